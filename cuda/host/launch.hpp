// launch: what crosses between Python (kernels/host.py, whose structures mirror these) and a kernel
// that g++ compiled.
#pragma once
#include <cstdint>
#include <utility>

namespace simt {

struct Region {  // global memory that a launch was given
    const char* name;
    std::uint8_t* begin;
    std::uint64_t bytes;
    std::uint8_t* written;  // a byte per byte, 1 where something wrote it; null: all is written
    std::uint32_t is_writable;
};

enum Order : std::uint32_t { FORWARD, REVERSE, SHUFFLED };

struct Request {
    const char* kernel;  // its name in reports
    std::uint32_t grid[3], block[3];
    std::uint32_t shared_bytes;  // of SHARED_DYNAMIC
    std::uint32_t region_count;
    const Region* regions;
    void** arguments;  // one pointer per parameter, to its value
    std::uint32_t order;
    std::uint32_t seed;           // of SHUFFLED
    std::uint32_t worker_count;   // OS threads; a block runs on one of them
    std::uint32_t counts_banks;   // whether bank conflicts are counted, which is slow
};

struct BankCount {  // one line's accesses to shared memory, summed over warps
    const char* file;
    std::uint64_t line, accesses, wavefronts, wavefronts_ideal;
};
constexpr int BANK_COUNTS = 64;

struct Report {
    char fault[1024];  // empty: none
    std::uint64_t collectives, barriers;
    std::uint64_t bank_count_count;
    BankCount bank_counts[BANK_COUNTS];
};

// Runs the grid; returns 0, or 1 with report->fault set.  `body(context)` is one thread's kernel.
int run(const Request* request, Report* report, void (*body)(void*), void* context);

template <class... P, std::size_t... I>
int launch(const Request* request, Report* report, void (*kernel)(P...),
           std::index_sequence<I...>) {
    struct Call { void (*kernel)(P...); void** arguments; } call{kernel, request->arguments};
    return run(request, report, [](void* context) {
        auto* call = static_cast<Call*>(context);
        call->kernel(*static_cast<P*>(call->arguments[I])...);
    }, &call);
}
template <class... P>
int launch(const Request* request, Report* report, void (*kernel)(P...)) {
    return launch(request, report, kernel, std::index_sequence_for<P...>{});
}

}  // namespace simt
