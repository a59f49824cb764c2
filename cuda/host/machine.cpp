// machine: runs a grid.  A worker (an OS thread) takes block after block; within a block it runs
// the fibres of a warp until each waits or is done, then another warp's.
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <thread>

#include "fibre.hpp"
#include "memory.hpp"

namespace simt {

thread_local Thread* self;

namespace {

constexpr std::size_t STACK_BYTES = 64 * 1024;
constexpr std::uint64_t CANARY = 0x5afe57ac15afe57a;
constexpr std::uint32_t BLOCK_THREADS_MAX = 1024;

enum class State : std::uint8_t { READY, AT_COLLECTIVE, AT_BARRIER, DONE };

struct Fibre {
    Thread thread;
    Context context;
    State state;
    Site site;         // where it waits
    const char* name;  // of the collective it waits in
    void* operand;
    std::uint8_t* stack;
};

struct Warp {
    unsigned arrived, ready;
    std::uint32_t epoch;
    BankCounter banks;
};

struct Launch {
    Launch(const Request& request, Report& report, void (*body)(void*), void* context)
        : request(request), report(report), body(body), context(context) {}
    const Request& request;
    Report& report;
    void (*body)(void*);
    void* context;
    std::atomic<std::uint64_t> next_block{0};
    std::atomic<bool> is_faulty{false};
    std::mutex mutex;
};

struct Random {  // a linear congruence: the same thread orders on every machine
    std::uint32_t state;
    unsigned below(unsigned n) {
        state = state * 1664525u + 1013904223u;
        return unsigned((std::uint64_t(state) * n) >> 32);
    }
};

class Worker {
public:
    explicit Worker(Launch& launch);
    void work();
    void wait(State state, Site site, const char* name);
    [[noreturn]] void fault_of(const Fibre& fibre, Site site, const char* text);

    Launch& launch_;
    SharedMemory shared_;
    GlobalMemory global_;
    std::vector<Fibre> fibres_;
    std::vector<Warp> warps_;
    std::uint32_t epoch_ = 0;
    std::uint64_t collectives_ = 0, barriers_ = 0;

private:
    void run_block(std::uint64_t number);
    Warp* pick();
    void run_warp(unsigned warp);
    bool settle();
    void report_stuck();
    void draw_order();

    std::unique_ptr<std::uint8_t[]> stacks_;
    Context scheduler_;
    Random random_;
    std::vector<unsigned> warp_order_;
    unsigned lane_order_[32];
};

thread_local Worker* worker;

void fibre_entry() {
    worker->launch_.body(worker->launch_.context);
    worker->wait(State::DONE, {}, "");
    std::abort();  // nobody resumes a fibre that is done
}

Worker::Worker(Launch& launch) : launch_(launch), random_{launch.request.seed} {
    const Request& request = launch.request;
    const unsigned count = request.block[0] * request.block[1] * request.block[2];
    global_.begin_launch(request);
    shared_.begin_launch(request.shared_bytes);
    stacks_.reset(new std::uint8_t[count * STACK_BYTES]);
    fibres_.resize(count);
    warps_.resize(count / 32);
    for (unsigned i = 0; i < count; ++i) {
        Fibre& fibre = fibres_[i];
        fibre.thread.thread = {i % request.block[0], i / request.block[0] % request.block[1],
                               i / request.block[0] / request.block[1]};
        fibre.thread.block_size = {request.block[0], request.block[1], request.block[2]};
        fibre.thread.grid_size = {request.grid[0], request.grid[1], request.grid[2]};
        fibre.thread.lane = i % 32;
        fibre.thread.warp = i / 32;
        fibre.stack = stacks_.get() + i * STACK_BYTES;
    }
    warp_order_.resize(warps_.size());
    for (unsigned i = 0; i < warps_.size(); ++i) {
        warp_order_[i] = request.order == REVERSE ? unsigned(warps_.size()) - 1 - i : i;
    }
    for (unsigned i = 0; i < 32; ++i) lane_order_[i] = request.order == REVERSE ? 31 - i : i;
}

void Worker::draw_order() {
    const auto shuffle = [&](unsigned* order, unsigned count) {
        for (unsigned i = count; i > 1; --i) std::swap(order[i - 1], order[random_.below(i)]);
    };
    shuffle(warp_order_.data(), unsigned(warp_order_.size()));
    shuffle(lane_order_, 32);
}

void Worker::work() {
    worker = this;
    const Request& request = launch_.request;
    const std::uint64_t count = std::uint64_t(request.grid[0]) * request.grid[1] * request.grid[2];
    while (!launch_.is_faulty) {
        const std::uint64_t number = launch_.next_block++;
        if (number >= count) break;
        run_block(request.order == REVERSE ? count - 1 - number : number);
    }
}

void Worker::run_block(std::uint64_t number) {
    const Request& request = launch_.request;
    const Index3 block = {unsigned(number % request.grid[0]),
                          unsigned(number / request.grid[0] % request.grid[1]),
                          unsigned(number / request.grid[0] / request.grid[1])};
    shared_.begin_block(++epoch_);
    for (Warp& warp : warps_) warp.arrived = 0, warp.ready = 32;
    for (Fibre& fibre : fibres_) {
        fibre.thread.block = block;
        fibre.state = State::READY;
        std::memcpy(fibre.stack, &CANARY, sizeof CANARY);
        // Stacks begin at different cache sets, or 32 lanes would fight for the same few lines.
        const std::size_t stagger = fibre.thread.lane * 320 % 4096 / 16 * 16;
        prepare(fibre.context, fibre.stack, STACK_BYTES - stagger, fibre_entry);
    }
    do {
        while (Warp* warp = pick()) run_warp(unsigned(warp - warps_.data()));
    } while (!launch_.is_faulty && settle());
    for (const Fibre& fibre : fibres_) {
        if (std::memcmp(fibre.stack, &CANARY, sizeof CANARY) != 0) {
            std::fputs("simt: a kernel's local variables overflow its fibre's stack\n", stderr);
            std::abort();
        }
    }
}

Warp* Worker::pick() {
    if (launch_.is_faulty) return nullptr;
    if (launch_.request.order == SHUFFLED) draw_order();
    for (unsigned warp : warp_order_) {
        if (warps_[warp].ready) return &warps_[warp];
    }
    return nullptr;
}

void Worker::run_warp(unsigned warp) {
    for (unsigned lane : lane_order_) {
        Fibre& fibre = fibres_[warp * 32 + lane];
        if (fibre.state != State::READY) continue;
        self = &fibre.thread;
        switch_to(scheduler_, fibre.context);
        if (launch_.is_faulty) return;
    }
}

void Worker::wait(State state, Site site, const char* name) {
    Fibre& fibre = fibres_[self->warp * 32 + self->lane];
    fibre.state = state;
    fibre.site = site;
    fibre.name = name;
    --warps_[self->warp].ready;
    switch_to(fibre.context, scheduler_);
}

// Nobody can run: opens the barrier if all are there.  False: the block is over.
bool Worker::settle() {
    unsigned done = 0;
    const Fibre& first = fibres_.front();
    bool is_together = first.state == State::AT_BARRIER;
    for (const Fibre& fibre : fibres_) {
        done += fibre.state == State::DONE;
        is_together &= fibre.state == State::AT_BARRIER && fibre.site.line == first.site.line &&
                       std::strcmp(fibre.site.file, first.site.file) == 0;
    }
    if (launch_.request.counts_banks) {
        for (Warp& warp : warps_) warp.banks.flush();
    }
    if (done == fibres_.size()) return false;
    if (!is_together) {
        report_stuck();
        return false;
    }
    ++epoch_;
    ++barriers_;
    for (Fibre& fibre : fibres_) fibre.state = State::READY;
    for (Warp& warp : warps_) warp.ready = 32;
    return true;
}

void write_fault(Launch& launch, const Thread& thread, Site site, const char* text) {
    const std::lock_guard lock(launch.mutex);
    if (launch.is_faulty) return;
    std::snprintf(launch.report.fault, sizeof launch.report.fault,
                  "%s:%d: %s, block (%u, %u, %u), thread (%u, %u, %u): %s", site.file, site.line,
                  launch.request.kernel, thread.block.x, thread.block.y, thread.block.z,
                  thread.thread.x, thread.thread.y, thread.thread.z, text);
    launch.is_faulty = true;
}

// Some thread waits for others that will not come.  Says who, and where the others are.
void Worker::report_stuck() {
    const Fibre* waiting = nullptr;
    for (const Fibre& fibre : fibres_) {
        const bool is_stronger = fibre.state == State::AT_COLLECTIVE &&
                                 (!waiting || waiting->state == State::AT_BARRIER);
        if (is_stronger || (!waiting && fibre.state == State::AT_BARRIER)) waiting = &fibre;
    }
    const bool in_warp = waiting->state == State::AT_COLLECTIVE;
    for (const Fibre& other : fibres_) {
        if (in_warp && other.thread.warp != waiting->thread.warp) continue;
        const bool is_same_barrier = !in_warp && other.state == State::AT_BARRIER &&
                                     other.site.line == waiting->site.line;
        if (&other == waiting || is_same_barrier ||
            (in_warp && other.state == State::AT_COLLECTIVE)) {
            continue;
        }
        char text[512];
        const unsigned number = other.thread.warp * 32 + other.thread.lane;
        if (other.state == State::DONE) {
            std::snprintf(text, sizeof text, "waits in `%s`, but thread %u has left the kernel",
                          waiting->name, number);
        } else {
            std::snprintf(text, sizeof text, "waits in `%s`, thread %u in `%s` of line %d",
                          waiting->name, number, other.name, other.site.line);
        }
        write_fault(launch_, waiting->thread, waiting->site, text);
        return;
    }
}

Moment moment() {
    const Worker& w = *worker;
    return {w.epoch_, w.warps_[self->warp].epoch, std::uint16_t(self->warp * 32 + self->lane),
            std::uint16_t(self->warp)};
}

void note_banks(const void* p, unsigned size, Site site) {
    if (!worker->launch_.request.counts_banks) return;
    worker->warps_[self->warp].banks.note(self->lane, worker->shared_.offset(p), size, site);
}

const char* refusal(const Request& request) {
    const std::uint64_t threads =
        std::uint64_t(request.block[0]) * request.block[1] * request.block[2];
    if (threads == 0 || threads > BLOCK_THREADS_MAX || threads % 32) {
        return "a block is 32 to 1024 threads, in whole warps";
    }
    if (request.shared_bytes > SHARED_BYTES_MAX) return "a block has 96 KiB of shared memory";
    if (request.grid[1] > 65535 || request.grid[2] > 65535) return "grid y and z are below 65536";
    return nullptr;
}

void add_counts(const Worker& done, Report& report) {
    report.collectives += done.collectives_;
    report.barriers += done.barriers_;
    for (const Warp& warp : done.warps_) {
        for (const auto& [key, count] : warp.banks.counts()) {
            BankCount* to = report.bank_counts;
            BankCount* end = to + report.bank_count_count;
            while (to < end && (to->file != count.file || to->line != count.line)) ++to;
            if (to == end) {
                if (report.bank_count_count == BANK_COUNTS) continue;
                ++report.bank_count_count;
                *to = {count.file, count.line, 0, 0, 0};
            }
            to->accesses += count.accesses;
            to->wavefronts += count.wavefronts;
            to->wavefronts_ideal += count.wavefronts_ideal;
        }
    }
}

}  // namespace

// --- what kernels call ---------------------------------------------------------------------------

void fault(Site site, const char* format, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    write_fault(worker->launch_, *self, site, text);
    worker->wait(State::DONE, site, "fault");  // its block is abandoned: nobody resumes it
    std::abort();
}

void check_read(Space space, const void* p, unsigned size, Site site) {
    if (space == Space::GLOBAL) return worker->global_.check_read(p, size, site);
    worker->shared_.check_read(p, size, moment(), site);
    note_banks(p, size, site);
}

void check_write(Space space, void* p, unsigned size, Site site) {
    if (space == Space::GLOBAL) return worker->global_.check_write(p, size, site);
    worker->shared_.check_write(p, size, moment(), site);
    note_banks(p, size, site);
}

void* shared_array(const void* key, unsigned bytes, Site site) {
    return worker->shared_.array(key, bytes, site);
}

void* shared_dynamic(Site site) {
    if (!worker->launch_.request.shared_bytes) fault(site, "the launch gave no shared memory");
    return worker->shared_.dynamic();
}

void barrier(Site site) { worker->wait(State::AT_BARRIER, site, "sync_block"); }

void collective(const char* name, void* operand, void (*act)(void* const*), Site site) {
    Warp& warp = worker->warps_[self->warp];
    Fibre* lanes = worker->fibres_.data() + self->warp * 32;
    Fibre& mine = lanes[self->lane];
    mine.operand = operand;
    for (unsigned lane = 0; lane < 32 && warp.arrived; ++lane) {
        if (lanes[lane].state != State::AT_COLLECTIVE) continue;
        const Fibre& other = lanes[lane];
        if (other.site.line != site.line || std::strcmp(other.name, name) != 0) {
            fault(site, "meets `%s`, while lane %u waits in `%s` of line %d", name, lane,
                  other.name, other.site.line);
        }
        break;
    }
    if (++warp.arrived < 32) return worker->wait(State::AT_COLLECTIVE, site, name);
    warp.arrived = 0;
    ++worker->collectives_;
    if (act) {
        void* operands[32];
        for (unsigned lane = 0; lane < 32; ++lane) operands[lane] = lanes[lane].operand;
        act(operands);
    } else {
        ++warp.epoch;  // sync_warp: the one that orders memory
    }
    if (worker->launch_.request.counts_banks) warp.banks.flush();
    for (unsigned lane = 0; lane < 32; ++lane) lanes[lane].state = State::READY;
    warp.ready = 32;
}

int run(const Request* request, Report* report, void (*body)(void*), void* context) {
    std::memset(report, 0, sizeof *report);
    Launch launch(*request, *report, body, context);
    if (const char* reason = refusal(*request)) {
        std::snprintf(report->fault, sizeof report->fault, "%s: %s", request->kernel, reason);
        return 1;
    }
    const auto work = [&launch] {
        Worker worker(launch);
        worker.work();
        const std::lock_guard lock(launch.mutex);
        add_counts(worker, launch.report);
    };
    std::vector<std::thread> helpers;
    for (std::uint32_t i = 1; i < request->worker_count; ++i) helpers.emplace_back(work);
    work();
    for (std::thread& helper : helpers) helper.join();
    return launch.is_faulty;
}

}  // namespace simt
