// simt: CUDA's execution model on a CPU, for tests.  What a kernel sees of it when g++ compiles it.
//
// Every CUDA thread of a block is a fibre; barriers and warp collectives are where fibres yield,
// so nothing runs twice at a time and a run repeats exactly.  host/machine.cpp schedules the fibres
// and holds what is known of memory; here are CUDA's names, and accessors that ask it first.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#define DEVICE inline
#define KERNEL(threads, blocks) void
#define __restrict__ __restrict

struct uint2 { alignas(8) unsigned x; unsigned y; };
struct int2 { alignas(8) int x; int y; };
struct float2 { alignas(8) float x; float y; };
struct uint4 { alignas(16) unsigned x; unsigned y, z, w; };
struct int4 { alignas(16) int x; int y, z, w; };
struct float4 { alignas(16) float x; float y, z, w; };
struct Index3 { unsigned x, y, z; };
using half = _Float16;
struct half2 { alignas(4) half x; half y; };

namespace simt {

struct Site {  // a line of a kernel
    const char* file;
    int line;
    static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
        return {file, line};
    }
};

struct Thread {
    Index3 thread, block, block_size, grid_size;
    unsigned lane, warp;
};
extern thread_local Thread* self;  // the fibre that runs

enum class Space { GLOBAL, SHARED };
// Both end the launch with a report where the access is wrong.
void check_read(Space space, const void* p, unsigned size, Site site);
void check_write(Space space, void* p, unsigned size, Site site);
// The block's allocation for the declaration `key`, the same for each of its threads.
void* shared_array(const void* key, unsigned bytes, Site site);
void* shared_dynamic(Site site);
void barrier(Site site);
// Waits for the 31 other lanes; then `act` is called once with the operands of all 32, by lane.
void collective(const char* name, void* operand, void (*act)(void* const* operands), Site site);
[[noreturn]] void fault(Site site, const char* format, ...) __attribute__((format(printf, 2, 3)));

template <class T>
T read(Space space, const T* p, Site site) {
    static_assert(sizeof(T) <= 16 && (sizeof(T) & (sizeof(T) - 1)) == 0, "one access: 1 to 16 B");
    check_read(space, p, sizeof(T), site);
    T value;
    std::memcpy(&value, p, sizeof(T));
    return value;
}
template <class T>
void write(Space space, T* p, T value, Site site) {
    static_assert(sizeof(T) <= 16 && (sizeof(T) & (sizeof(T) - 1)) == 0, "one access: 1 to 16 B");
    check_write(space, p, sizeof(T), site);
    std::memcpy(p, &value, sizeof(T));
}

// shuffles: each lane offers a value and names the lane whose value it wants
template <class T>
struct Shuffled { T offered, received; int source; };
template <class T>
T shuffled(const char* name, T value, int source, Site site) {
    Shuffled<T> mine{value, value, source};
    collective(name, &mine, [](void* const* lanes) {
        for (int lane = 0; lane < 32; ++lane) {
            auto* to = static_cast<Shuffled<T>*>(lanes[lane]);
            to->received = static_cast<const Shuffled<T>*>(lanes[to->source & 31])->offered;
        }
    }, site);
    return mine.received;
}

struct Mma { float* c; std::uint32_t a[2], b[2]; };
void mma_row_col(void* const* lanes);
void mma_row_row(void* const* lanes);

}  // namespace simt

#define SITE , simt::Site site = simt::Site::here()
#define SITE_ONLY simt::Site site = simt::Site::here()
#define AT , site
#define AT_ONLY site
#define SHARED(type, name, count)                                       \
    static const char name##_key = 0;                                   \
    type* const name = static_cast<type*>(simt::shared_array(           \
        &name##_key, sizeof(type) * (count), simt::Site::here()))
#define SHARED_DYNAMIC(type, name) \
    type* const name = static_cast<type*>(simt::shared_dynamic(simt::Site::here()))
#define threadIdx (simt::self->thread)
#define blockIdx (simt::self->block)
#define blockDim (simt::self->block_size)
#define gridDim (simt::self->grid_size)

// --- memory --------------------------------------------------------------------------------------

template <class T>
T load(const T* p SITE) { return simt::read(simt::Space::GLOBAL, p, site); }
template <class T>
T load_constant(const T* p SITE) { return simt::read(simt::Space::GLOBAL, p, site); }
inline uint4 load_once(const uint4* p SITE) { return simt::read(simt::Space::GLOBAL, p, site); }
template <class T>
void store(T* p, T value SITE) { simt::write(simt::Space::GLOBAL, p, value, site); }
template <class T>
T load_shared(const T* p SITE) { return simt::read(simt::Space::SHARED, p, site); }
template <class T>
void store_shared(T* p, T value SITE) { simt::write(simt::Space::SHARED, p, value, site); }

// --- collectives ---------------------------------------------------------------------------------

inline void sync_block(SITE_ONLY) { simt::barrier(site); }
inline void sync_warp(SITE_ONLY) { simt::collective("sync_warp", nullptr, nullptr, site); }
template <class T>
T shuffle(T value, int lane SITE) { return simt::shuffled("shuffle", value, lane, site); }
template <class T>
T shuffle_xor(T value, int mask SITE) {
    return simt::shuffled("shuffle_xor", value, int(simt::self->lane) ^ mask, site);
}
template <class T>  // a lane without a source keeps its own value
T shuffle_up(T value, int delta SITE) {
    const int lane = int(simt::self->lane);
    return simt::shuffled("shuffle_up", value, lane < delta ? lane : lane - delta, site);
}
template <class T>
T shuffle_down(T value, int delta SITE) {
    const int lane = int(simt::self->lane);
    return simt::shuffled("shuffle_down", value, lane + delta > 31 ? lane : lane + delta, site);
}
inline std::uint32_t ballot(bool fact SITE) {
    struct Vote { bool fact; std::uint32_t all; } mine{fact, 0};
    simt::collective("ballot", &mine, [](void* const* lanes) {
        std::uint32_t all = 0;
        for (int lane = 0; lane < 32; ++lane) {
            all |= std::uint32_t(static_cast<Vote*>(lanes[lane])->fact) << lane;
        }
        for (int lane = 0; lane < 32; ++lane) static_cast<Vote*>(lanes[lane])->all = all;
    }, site);
    return mine.all;
}
inline void mma_row_col(float (&c)[8], unsigned a0, unsigned a1, unsigned b0, unsigned b1 SITE) {
    simt::Mma mine{c, {a0, a1}, {b0, b1}};
    simt::collective("mma_row_col", &mine, simt::mma_row_col, site);
}
inline void mma_row_row(float (&c)[8], unsigned a0, unsigned a1, unsigned b0, unsigned b1 SITE) {
    simt::Mma mine{c, {a0, a1}, {b0, b1}};
    simt::collective("mma_row_row", &mine, simt::mma_row_row, site);
}

// --- numbers: each half operation rounds once, as on the device ----------------------------------

inline float to_f32(half h) { return float(h); }
inline half to_f16(float f) { return half(f); }
template <class To, class From>
To same_bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof(To));
    return to;
}
inline std::uint32_t bits_of(half2 h) { return same_bits<std::uint32_t>(h); }
inline half2 half2_of(std::uint32_t bits) { return same_bits<half2>(bits); }
inline half half_of(std::uint16_t bits) { return same_bits<half>(bits); }
inline std::uint16_t bits_of(half h) { return same_bits<std::uint16_t>(h); }
inline half2 both(half h) { return {h, h}; }
// A sum, a difference and a product of halves are exact enough in f32 that rounding to f32 before
// rounding to f16 changes nothing; the sum of a product is exact in f64 wherever f16 can hold it.
inline half add(half a, half b) { return half(float(a) + float(b)); }
inline half sub(half a, half b) { return half(float(a) - float(b)); }
inline half mul(half a, half b) { return half(float(a) * float(b)); }
inline half fma(half a, half b, half c) { return half(double(a) * double(b) + double(c)); }
inline half2 add2(half2 a, half2 b) { return {add(a.x, b.x), add(a.y, b.y)}; }
inline half2 sub2(half2 a, half2 b) { return {sub(a.x, b.x), sub(a.y, b.y)}; }
inline half2 mul2(half2 a, half2 b) { return {mul(a.x, b.x), mul(a.y, b.y)}; }
inline half2 fma2(half2 a, half2 b, half2 c) { return {fma(a.x, b.x, c.x), fma(a.y, b.y, c.y)}; }
inline std::uint32_t and_or(std::uint32_t a, std::uint32_t mask, std::uint32_t b) {
    return (a & mask) | b;
}
inline float exp_f32(float x) { return std::exp(x); }
inline float rsqrt_f32(float x) { return 1.0f / std::sqrt(x); }
inline std::uint32_t f32_bits(float f) { return same_bits<std::uint32_t>(f); }
inline float f32_of(std::uint32_t bits) { return same_bits<float>(bits); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __clz(unsigned bits) { return bits ? __builtin_clz(bits) : 32; }
inline int __ffs(unsigned bits) { return __builtin_ffs(int(bits)); }
inline unsigned __umulhi(unsigned a, unsigned b) {
    return unsigned((std::uint64_t(a) * b) >> 32);
}
// Byte i of the result is the byte of low:high that nibble i of the selector names.
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    const std::uint64_t bytes = std::uint64_t(high) << 32 | low;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) {
        result |= unsigned(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    }
    return result;
}
using std::max;
using std::min;
