// moe: which experts serve a row, and what becomes of their answers.
// Wrapper: phaseloop/kernels/moe.py.  Their matrices are multiplied in experts.cu.
//
//   route     of softmax(logits[t,:]) the U highest, of equals the lower expert, and their shares;
//             with `normalise` the shares of a row sum to 1
//   sort_by_expert   assignments a = t U + j in the order of their experts, and within one of a:
//             order[i] is the i-th, place[a] where a is; tiles: each expert's stretch in pieces of
//             at most `rows`, as (expert, first i, count); after the last one (-1, 0, 0)
//   combine   y[t,:] = sum_j shares[t,j] * x[place[t U + j],:], in the order of j, and
//             + sigmoid(gate[t]) * shared[t,:] where there is a shared expert
//
// Shapes     logits: f32 [T, E]; experts: i32 [T, U], shares: f32 [T, U]; order, place: i32 [T U];
//            tiles: i32 [tiles, 4], tiles >= min(T U, T U / rows + E); x: f32 [T U, D];
//            shared: f32 [T, D], gate: f32 [T], or null; y: f32 [T, D].  E <= 512, U <= 32, 4 | D.
// Numerics   f32, sums in a fixed order: a row's bits do not depend on its neighbours.  A row with
//            a NaN is served by some expert, and stays NaN.
// Mapping    route: a warp per row.  sort_by_expert: one block; a warp counts, then places, E / 32
//            experts, 32 assignments at a time, by votes; no atomics.  combine: a thread per 4
//            elements.
// Roofline   combine moves 4 (U + 2) B per element: D = 2048, U = 8, T = 2048: 168 MB, 190 us.
//            sort_by_expert: T U = 16384, E = 128: 2 * 512 votes for each of a warp's 4 experts,
//            some 60 us.
// Measured   not yet, for want of a device.
#include "rank.cuh"

constexpr int WARPS = 8, THREADS = WARPS * WARP, PACK = 4;
constexpr int EXPERTS_MAX = 512, EACH = EXPERTS_MAX / WARP;

KERNEL(THREADS, 4)
route(const float* logits, int* experts, float* shares, int normalise, int T, int E, int U) {
    const int row = blockIdx.x * WARPS + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (row >= T) return;  // a whole warp
    u64 keys[EACH], best = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int expert = i * WARP + lane;
        keys[i] = expert < E ? key_of(load_constant(logits + size_t(row) * E + expert), expert) : 0;
        best = keys[i] > best ? keys[i] : best;
    }
    const float top = score_of(best_of_warp(best));
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; ++i) total += keys[i] ? exp_f32(score_of(keys[i]) - top) : 0.0f;
    total = warp_sum(total);

    u64 chosen = 0;  // lane j keeps the j-th
    for (int j = 0; j < U; ++j) {
        best = 0;
#pragma unroll
        for (int i = 0; i < EACH; ++i) best = keys[i] > best ? keys[i] : best;
        best = best_of_warp(best);
        if (lane == j) chosen = best;
#pragma unroll
        for (int i = 0; i < EACH; ++i) keys[i] = keys[i] == best ? 0 : keys[i];
    }
    float share = lane < U ? exp_f32(score_of(chosen) - top) / total : 0.0f;
    const float sum = warp_sum(share);
    if (normalise) share /= sum;
    if (lane >= U) return;
    store(experts + row * U + lane, number_of(chosen));
    store(shares + row * U + lane, share);
}

// --- sorting -------------------------------------------------------------------------------------

constexpr int SORT_WARPS = 32, SORT_THREADS = SORT_WARPS * WARP;
constexpr int SORT_EACH = EXPERTS_MAX / SORT_WARPS;  // experts of a warp, SORT_WARPS apart

// The prefix sums of counts[E], and of how many tiles of `rows` each takes, by one warp.
DEVICE void add_up(const int* counts, int* starts, int* tile_starts, int rows, int E SITE) {
    const int lane = threadIdx.x % WARP;
    int before = 0, tiles_before = 0;
    for (int first = 0; first < E; first += WARP) {
        const int expert = first + lane;
        const int count = expert < E ? load_shared(counts + expert AT) : 0;
        int sum = count, tiles = (count + rows - 1) / rows;
        const int own = tiles;
        for (int distance = 1; distance < WARP; distance *= 2) {
            const int other = shuffle_up(sum, distance AT), others = shuffle_up(tiles, distance AT);
            if (lane >= distance) sum += other, tiles += others;
        }
        if (expert < E) {
            store_shared(starts + expert, before + sum - count AT);
            store_shared(tile_starts + expert, tiles_before + tiles - own AT);
        }
        before += shuffle(sum, WARP - 1 AT);
        tiles_before += shuffle(tiles, WARP - 1 AT);
    }
    if (lane == 0) store_shared(tile_starts + E, tiles_before AT);
}

// Calls votes(i, ballot, is_mine, assignment) for each 32 assignments and each i of the warp's
// experts.
template <class Votes>
DEVICE void scan(const int* experts, int A, const Votes& votes SITE) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    for (int first = 0; first < A; first += WARP) {
        const int expert = first + lane < A ? load_constant(experts + first + lane AT) : -1;
#pragma unroll
        for (int i = 0; i < SORT_EACH; ++i) {
            const bool is_mine = expert == i * SORT_WARPS + warp;
            votes(i, ballot(is_mine AT), is_mine, first + lane);
        }
    }
}

KERNEL(SORT_THREADS, 1)
sort_by_expert(const int* experts, int* order, int* place, int4* tiles, int A, int E, int rows,
               int tile_count) {
    SHARED(int, counts, EXPERTS_MAX);
    SHARED(int, starts, EXPERTS_MAX);
    SHARED(int, tile_starts, EXPERTS_MAX + 1);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int found[SORT_EACH] = {};  // of each of the warp's experts
    scan(experts, A, [&](int i, u32 votes, bool, int) { found[i] += __popc(votes); });
#pragma unroll
    for (int i = 0; i < SORT_EACH; ++i) {
        if (lane == 0) store_shared(counts + i * SORT_WARPS + warp, found[i]);
    }
    sync_block();  // all counts are there
    if (warp == 0) add_up(counts, starts, tile_starts, rows, E);
    sync_block();  // all starts are there

    for (int expert = warp; expert < E; expert += SORT_WARPS) {
        const int count = load_shared(counts + expert), first = load_shared(starts + expert);
        int4* to = tiles + load_shared(tile_starts + expert);
        for (int tile = lane; tile * rows < count; tile += WARP) {
            store(to + tile, int4{expert, first + tile * rows, min(rows, count - tile * rows), 0});
        }
    }
    for (int i = load_shared(tile_starts + E) + threadIdx.x; i < tile_count; i += SORT_THREADS) {
        store(tiles + i, int4{-1, 0, 0, 0});
    }
    int next[SORT_EACH];  // where the next of each of the warp's experts goes
#pragma unroll
    for (int i = 0; i < SORT_EACH; ++i) {
        const int expert = i * SORT_WARPS + warp;
        next[i] = expert < E ? load_shared(starts + expert) : 0;
    }
    scan(experts, A, [&](int i, u32 votes, bool is_mine, int assignment) {
        if (is_mine) {
            const int at = next[i] + __popc(votes & ((1u << lane) - 1));
            store(order + at, assignment);
            store(place + assignment, at);
        }
        next[i] += __popc(votes);
    });
}

KERNEL(THREADS, 8)
combine(const float* x, const int* place, const float* shares, const float* shared,
        const float* gate, float* y, int U, int D) {
    const int d = (blockIdx.x * THREADS + threadIdx.x) * PACK, row = blockIdx.y;
    if (d >= D) return;
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
    const auto add = [&](const float* from, float share) {
        const float4 v = load_constant(reinterpret_cast<const float4*>(from + d));
        sum = {fmaf(share, v.x, sum.x), fmaf(share, v.y, sum.y), fmaf(share, v.z, sum.z),
               fmaf(share, v.w, sum.w)};
    };
    for (int j = 0; j < U; ++j) {
        const int at = load_constant(place + row * U + j);
        add(x + size_t(at) * D, load_constant(shares + row * U + j));
    }
    if (shared) {
        const float open = 1.0f / (1.0f + exp_f32(-load_constant(gate + row)));
        add(shared + size_t(row) * D, open);
    }
    store(reinterpret_cast<float4*>(y + size_t(row) * D + d), sum);
}
