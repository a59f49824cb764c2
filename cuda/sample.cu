// sample: from logits to tokens, without the vocabulary leaving the device.
// Wrapper: phaseloop/kernels/sample.py.
//
//   top_of_slice   of each slice of 4096 logits of a row, the K best, best first
//   draw           of a row, the K best of all slices, best first; then, of the top_k[b] best, what
//                  top-p, min-p and the temperature leave, from which a random number draws:
//                    top-p   the fewest of the best whose probabilities reach top_p[b]
//                    min-p   those with at least min_p[b] times the best's probability
//                    the draw: the first whose cumulated probability e^(logit / temperature)
//                    reaches u, of the sum; u = Philox4x32-10 of counter (position, 0, choice, 0)
//                    and key seed, as engine/sampling_random.py has it
//   Better is: a higher logit, of equals the lower token.  A row whose best is not finite (a NaN
//   counts as the best) has no token: -1.  A temperature of 0 or below takes the best.
//
// Shapes     logits: f32 [B, V]; keys: u64 [B, slices, K], slices = ceil(V / 4096); seeds: u64 [B];
//            positions, choices, top_k: i32 [B], 1 <= top_k <= K <= 128; temperature, top_p, min_p:
//            f64 [B], top_p >= 1 and min_p <= 0 being off; tokens: i32 [B]; ids: i32 [B, K], -1
//            where a row has fewer than K logits that are not minus infinity; values: f32 [B, K].
// Numerics   keys compare exactly; probabilities in f64, as the CPU's sampler has them, the sums
//            in the order of the candidates.
// Mapping    a block per slice and row, then per row.  A thread keeps its share of the keys in
//            registers; K times the block finds the best key of all, and its owner drops it.
// Roofline   4 B per logit, once: V = 151936: 0.6 MB, 0.7 us; but K rounds of some 150 cycles make
//            4 us of a slice for K = 40, and a row takes as long again.
// Measured   not yet, for want of a device.
#include "rank.cuh"

constexpr int WARPS = 8, THREADS = WARPS * WARP;
constexpr int SLICE = 4096, EACH = SLICE / THREADS;  // logits of a block, and of a thread
constexpr int CANDIDATES_MAX = 128;

// The best key of the block, known to all; `turn` alternates, so that one barrier is enough.
DEVICE u64 best_of_block(u64 key, u64* found, int turn SITE) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    u64* here = found + turn % 2 * WARPS;
    key = best_of_warp(key AT);
    if (lane == 0) store_shared(here + warp, key AT);
    sync_block(AT_ONLY);  // all warps' best are there, and nobody reads those before the last
    return best_of_warp(load_shared(here + lane % WARPS AT) AT);
}

// Takes the best K keys of all threads' out, best first, and gives each to `take(rank, key)`, which
// every thread calls.  Keys differ from each other, but for those that are 0.
template <int COUNT, class Take>
DEVICE void extract(u64 (&keys)[COUNT], int K, u64* found, const Take& take SITE) {
    u64 mine = 0;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) mine = keys[i] > mine ? keys[i] : mine;
    for (int rank = 0; rank < K; ++rank) {
        const u64 best = best_of_block(mine, found, rank AT);
        take(rank, best);
        if (best != mine) continue;
        mine = 0;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            if (keys[i] == best) keys[i] = 0;
            mine = keys[i] > mine ? keys[i] : mine;
        }
    }
}

KERNEL(THREADS, 4)
top_of_slice(const float* logits, u64* keys, int V, int K) {
    SHARED(u64, found, 2 * WARPS);
    const size_t row = blockIdx.y;
    u64 mine[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int token = blockIdx.x * SLICE + i * THREADS + threadIdx.x;
        mine[i] = token < V ? key_of(load_constant(logits + row * V + token), token) : 0;
    }
    u64* to = keys + (row * gridDim.x + blockIdx.x) * K;
    extract<EACH>(mine, K, found, [&](int rank, u64 key) {
        if (threadIdx.x == 0) store(to + rank, key);
    });
}

// --- the draw ------------------------------------------------------------------------------------

struct Words4 { u32 x, y, z, w; };

// Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).
DEVICE Words4 philox(Words4 counter, u32 key_low, u32 key_high) {
    for (int round = 0; round < 10; ++round) {
        const u64 first = u64(0xD2511F53u) * counter.x, second = u64(0xCD9E8D57u) * counter.z;
        counter = {u32(second >> 32) ^ counter.y ^ key_low, u32(second),
                   u32(first >> 32) ^ counter.w ^ key_high, u32(first)};
        key_low += 0x9E3779B9u;
        key_high += 0xBB67AE85u;
    }
    return counter;
}

// In [0, 1), with 53 bits.
DEVICE double uniform(u64 seed, u32 position, u32 choice) {
    const Words4 words = philox({position, 0, choice, 0}, u32(seed), u32(seed >> 32));
    return (double(words.x >> 5) * 67108864.0 + double(words.y >> 6)) / 9007199254740992.0;
}

// How many of the first weights it takes for their sum to reach the target, at least one; where
// rounding leaves all of them below it: as many as add anything.
DEVICE int count_up(const double* weights, int count, double target SITE) {
    double total = 0.0;
    for (int i = 0; i < count; ++i) total += load_shared(weights + i AT);
    target = target < total ? target : total;
    double sum = 0.0;
    int taken = 0;
    while (taken < count && (taken == 0 || sum < target)) {
        sum += load_shared(weights + taken++ AT);
    }
    return taken;
}

DEVICE double sum_of(const double* weights, int count SITE) {
    double sum = 0.0;
    for (int i = 0; i < count; ++i) sum += load_shared(weights + i AT);
    return sum;
}

struct Chances {  // of a row
    double temperature, top_p, min_p;
};

// weights[i] = e^(logit i / divisor - the best's), by a whole warp.
DEVICE void weigh(double* weights, const u64* best, int count, double divisor SITE) {
    const double top = double(score_of(load_shared(best AT)));
    for (int i = threadIdx.x % WARP; i < count; i += WARP) {
        const double logit = double(score_of(load_shared(best + i AT)));
        store_shared(weights + i, exp(logit / divisor - top / divisor) AT);
    }
    sync_warp(AT_ONLY);
}

// The place of the drawn one among `count` candidates, best first.  A whole warp calls it.
DEVICE int drawn(const u64* best, double* weights, int count, const Chances& chances,
                 double u SITE) {
    if (!(chances.temperature > 0.0) || count == 1) return 0;
    if (chances.top_p < 1.0) {
        weigh(weights, best, count, 1.0 AT);
        count = count_up(weights, count, chances.top_p * sum_of(weights, count AT) AT);
        sync_warp(AT_ONLY);  // the weights are read before others are written
    }
    if (chances.min_p > 0.0) {
        const double bound = double(score_of(load_shared(best AT))) + log(chances.min_p);
        int enough = 1;
        while (enough < count && double(score_of(load_shared(best + enough AT))) >= bound) ++enough;
        count = enough;
    }
    weigh(weights, best, count, chances.temperature AT);
    return count_up(weights, count, u * sum_of(weights, count AT) AT) - 1;
}

// SLICES: at most, of all rows' vocabulary; so that a thread's share of keys is known.
template <int SLICES>
KERNEL(THREADS, 1)
draw(const u64* keys, const u64* seeds, const int* positions, const int* choices, const int* top_k,
     const double* temperature, const double* top_p, const double* min_p, int* tokens, int* ids,
     float* values, int slices, int K) {
    constexpr int COUNT = SLICES * CANDIDATES_MAX / THREADS;
    SHARED(u64, found, 2 * WARPS);
    SHARED(u64, best, CANDIDATES_MAX);
    SHARED(double, weights, CANDIDATES_MAX);
    const size_t row = blockIdx.x;
    u64 mine[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const int at = i * THREADS + threadIdx.x;
        mine[i] = at < slices * K ? load_constant(keys + row * slices * K + at) : 0;
    }
    extract<COUNT>(mine, K, found, [&](int rank, u64 key) {
        if (threadIdx.x == 0) store_shared(best + rank, key);
    });
    sync_block();  // the candidates are there
    if (threadIdx.x >= WARP) return;  // whole warps

    int count = 0;  // of those that are not ruled out
    while (count < K && (load_shared(best + count) >> 32) > 0x007fffffu) ++count;
    for (int i = threadIdx.x; i < K; i += WARP) {
        const u64 key = load_shared(best + i);
        store(ids + row * K + i, i < count ? number_of(key) : -1);
        store(values + row * K + i, i < count ? score_of(key) : 0.0f);
    }
    const bool is_sound = count > 0 && (load_shared(best) >> 32) < 0xff800000u;
    int token = -1;
    if (is_sound) {
        const Chances chances = {load_constant(temperature + row), load_constant(top_p + row),
                                 load_constant(min_p + row)};
        const double u = uniform(load_constant(seeds + row), load_constant(positions + row),
                                 load_constant(choices + row));
        const int kept = min(count, max(1, load_constant(top_k + row)));
        token = number_of(load_shared(best + drawn(best, weights, kept, chances, u)));
    }
    if (threadIdx.x == 0) store(tokens + row, token);
}
