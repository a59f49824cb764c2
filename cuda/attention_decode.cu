// attention_decode: attention of generated and drafted tokens over all that is cached of their
// sequence, in partitions of a page.  Wrapper: phaseloop/kernels/attention_decode.py.
//
//   s[t,h,p]  = cap * tanh(scale * q[t,h,:] . k[p,h / G,:] / cap), without tanh where cap is 0,
//               for p <= position of t, and position - p < window
//   y[t,h,:]  = sum_p softmax_p(s)[p] * v[p,h / G,:]
//   attend_partition: for each partition of 256 positions, m = max_p s, l = sum_p e^(s - m),
//                     o[:] = sum_p e^(s - m) v[p,:].  merge_partitions: y from all m, l and o.
//
// Shapes     q: f16 [L, W, H, D], lane l's rows t < counts[l] <= W at positions starts[l] + t,
//            whose keys are cached; starts, counts: i32 [L]; table: i32 [L, pages]; the cache:
//            kv.cuh; o: f32 [L, W, H, slots, D], stats: f32 [L, W, H, slots, 2]; y: f16 [L, W, H,
//            D]. G = H / HKV.  D is 64, 96, 128, 192 or 256.  Rows from counts[l] on are left
//            alone.
// Numerics   products of halves, sums in f32; e^(s - m) is rounded to f16, in l as in o.  Against
//            f64: relative L2 <= 1e-3.  Partitions begin at multiples of 256, keys that a row does
//            not see add exact zeros, and partitions merge in a fixed order: so a row's bits depend
//            neither on L, W, slots, its place in the batch nor on the pages' places.
// Mapping    attend_partition: a block per KV head, partition (slot s is the s-th that the lane
//            sees) and 8 * TILES of the lane's W * G rows, which share every key that is loaded.
//            Eight warps take 32 keys each: a lane's pieces of one key are the B operand.  The
//            weights e^(s - m) go through shared memory and become the A operand; then a warp
//            takes 32 dimensions of the values, of all keys or of a part of them.
//            merge_partitions: a block per row and head; warp w takes partitions w, w + 8, ...
//            Too few slots for a lane give NaN, never a wrong answer.
// Roofline   a key and a value are read once per KV head and lane: 4 D B, or 2.125 D B of Q8_0, for
//            4 D W G flop.  D = 128, HKV = 8 at 4096 positions: 16.8 MB per layer, 19 us.  Of one
//            row of 8 that HMMA computes W * G / 8 are useful, which costs nothing below 8.
// Measured   not yet, for want of a device.
#include "attention.cuh"

constexpr int WARPS = 8, THREADS = WARPS * WARP, ROWS = 8;
constexpr int PARTITION = PAGE;                    // a warp has 32 keys of it
constexpr int PARTITION_OCTETS = PARTITION / OCTET;

// What a block works on.  A row is a token of the lane and a query head of the KV head's group.
struct Block {
    Scoring scoring;
    int head, G, W, H;
    int lane, start, count;  // of the batch: its first row's position, its rows
    int row_first;           // of the lane's count * G rows
    int partition, base;     // and its first position
    int live;                // keys of it that were written

    DEVICE int clamped(int row) const { return min(row_first + row, count * G - 1); }
    DEVICE bool has(int row) const { return row_first + row < count * G; }
    DEVICE int position(int row) const { return start + clamped(row) / G; }
    // Of a row among [L, W, H]; rows beyond the last repeat it.
    DEVICE size_t at(int row) const {
        const int r = clamped(row);
        return (size_t(lane) * W + r / G) * H + head * G + r % G;
    }
};

template <int TILES>
DEVICE Block this_block(const Scoring& scoring, const int* starts, const int* counts, int W, int H,
                        int HKV SITE) {
    Block block;
    block.scoring = scoring;
    block.head = blockIdx.x, block.G = H / HKV, block.W = W, block.H = H;
    const int blocks = (W * block.G + TILES * ROWS - 1) / (TILES * ROWS);
    block.lane = blockIdx.z / blocks;
    block.row_first = blockIdx.z % blocks * TILES * ROWS;
    block.start = load_constant(starts + block.lane AT);
    block.count = load_constant(counts + block.lane AT);
    block.partition = scoring.first(block.start) / PARTITION + blockIdx.y;
    block.base = block.partition * PARTITION;
    block.live = min(PARTITION, block.start + block.count - block.base);
    return block;
}

// A head's keys or values of a page.  Scales of KvQ8 are in shared memory.
template <class Kind, int D>
struct Plane {
    static constexpr int OCTETS = Kind::PIECE / OCTET;  // of a piece
    const uint4* pieces;
    const half* scales;  // [D / 32][256]

    // Dimensions PIECE * number .. of a token; tokens PIECE * number .. of a dimension.
    DEVICE uint4 key(int token, int number SITE) const {
        return load_once(pieces + number * PAGE + token AT);
    }
    DEVICE uint4 value(int number, int dim SITE) const {
        return load_once(pieces + number * D + dim AT);
    }
    // Octet `octet` of all, which is in the piece, as halves.
    DEVICE uint4 key_octet(uint4 piece, int token, int octet SITE) const {
        if constexpr (Kind::PIECE == KvF16::PIECE) return piece;
        const u32 scale = bits_of(both(load_shared(scales + scale_at(token, octet * OCTET) AT)));
        return half_of_piece(piece, octet, {scale, scale, scale, scale});
    }
    DEVICE uint4 value_octet(uint4 piece, int octet, int dim SITE) const {
        if constexpr (Kind::PIECE == KvF16::PIECE) return piece;
        const half* at = scales + scale_at(octet * OCTET, dim);
        const uint4 pairs = load_shared(reinterpret_cast<const uint4*>(at) AT);
        return half_of_piece(piece, octet, pairs);
    }
    DEVICE static uint4 half_of_piece(uint4 codes, int octet, uint4 pairs) {
        return octet % 2 ? scaled(codes.z, codes.w, pairs) : scaled(codes.x, codes.y, pairs);
    }
};

template <class Kind, int D>
DEVICE Plane<Kind, D> plane_of(const void* elements, const half* scales, half* staged, int page,
                               int head, int heads SITE) {
    const size_t before = plane_at(page, head, heads, D);
    const uint4* pieces = static_cast<const uint4*>(elements) + before / Kind::PIECE;
    if constexpr (Kind::PIECE == KvQ8::PIECE) {
        const uint4* from = reinterpret_cast<const uint4*>(scales + before / GROUP);
        for (int i = threadIdx.x; i < D * PAGE / GROUP / OCTET; i += THREADS) {
            store_shared(reinterpret_cast<uint4*>(staged) + i, load_once(from + i AT) AT);
        }
    }
    return {pieces, staged};
}

// The products of a warp's 32 keys with the rows; never() where a row does not see a key.
template <class Kind, int D, int TILES>
DEVICE void score_keys(float (&s)[TILES][8], const Block& block, const Plane<Kind, D>& keys,
                       const half* q SITE) {
    const int lane = threadIdx.x % WARP, first = threadIdx.x / WARP * WARP;
    const uint4* rows[TILES];
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        const size_t row = block.at(tile * ROWS + fragment_row(lane));
        rows[tile] = reinterpret_cast<const uint4*>(q + row * D);
    }
    if (first < block.live) {
        constexpr int OCTETS = Plane<Kind, D>::OCTETS;
#pragma unroll((TILES == 4 ? 2 : 4) / OCTETS)
        for (int number = 0; number < D / Kind::PIECE; ++number) {
            const uint4 piece = keys.key(first + lane, number AT);
#pragma unroll
            for (int octet = number * OCTETS; octet < (number + 1) * OCTETS; ++octet) {
                const uint4 b = keys.key_octet(piece, first + lane, octet AT);
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile) {
                    const uint4 a = load_constant(rows[tile] + octet AT);
                    mma_row_col(s[tile], a.x, a.y, b.x, b.y AT);
                    mma_row_col(s[tile], a.z, a.w, b.z, b.w AT);
                }
            }
        }
    }
#pragma unroll
    for (int n = 0; n < TILES * 8; ++n) {
        float& score = s[n / 8][n % 8];
        const int position = block.position(n / 8 * ROWS + score_row(lane, n % 8));
        const int key = first + score_column(lane, n % 8);
        const bool is_seen = key < block.live && block.scoring.sees(position, block.base + key);
        score = is_seen ? block.scoring.of(score) : never();
    }
}

// The greatest, or the sum, of a warp's 32 keys for each row, to found[warp][row].
template <int TILES, bool IS_SUM>
DEVICE void across_keys(float* found, const float (&s)[TILES][8] SITE) {
    const auto join = [](float a, float b) { return IS_SUM ? a + b : fmaxf(a, b); };
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; i += 2) {  // a lane has two rows of a tile, four keys of each
            float value =
                join(join(s[tile][i], s[tile][i + 1]), join(s[tile][i + 4], s[tile][i + 5]));
            value = join(value, shuffle_xor(value, 2 AT));
            value = join(value, shuffle_xor(value, 4 AT));
            value = join(value, shuffle_xor(value, 8 AT));
            const int row = tile * ROWS + score_row(lane, i);
            if ((lane & 14) == 0) store_shared(found + warp * TILES * ROWS + row, value AT);
        }
    }
}

// The same of all warps, in their order.
template <int TILES, bool IS_SUM>
DEVICE float across_warps(const float* found, int row SITE) {
    float value = load_shared(found + row AT);
    for (int warp = 1; warp < WARPS; ++warp) {
        const float other = load_shared(found + warp * TILES * ROWS + row AT);
        value = IS_SUM ? value + other : fmaxf(value, other);
    }
    return value;
}

// From scores to weights e^(s - maximum), rounded to f16, in s and in weights[octet of keys][row].
template <int TILES>
DEVICE void weigh(float (&s)[TILES][8], uint4* weights, const float* maxima SITE) {
    const int lane = threadIdx.x % WARP, first = threadIdx.x / WARP * WARP;
#pragma unroll
    for (int n = 0; n < TILES * 4; ++n) {
        const int tile = n / 4, i = n % 2 * 4 + n / 2 % 2 * 2;  // 0, 4: one row; 2, 6: another
        const int row = tile * ROWS + score_row(lane, i), key = first + score_column(lane, i);
        const float top = finite_maximum(across_warps<TILES, false>(maxima, row AT));
        const half low = to_f16(exp_f32(s[tile][i] - top));
        const half high = to_f16(exp_f32(s[tile][i + 1] - top));
        u32* piece = reinterpret_cast<u32*>(weights + key / OCTET * TILES * ROWS + row);
        store_shared(piece + key % OCTET / 2, pack2(low, high) AT);
        s[tile][i] = to_f32(low);
        s[tile][i + 1] = to_f32(high);
    }
}

// The weighted values of a warp's 32 dimensions and its part of the keys.
template <class Kind, int D, int TILES, int PARTS>
DEVICE void multiply_values(float (&c)[TILES][8], const Block& block, const Plane<Kind, D>& values,
                            const uint4* weights, int group, int part SITE) {
    constexpr int OCTETS = Plane<Kind, D>::OCTETS, PIECES = PARTITION / Kind::PIECE / PARTS;
    const int lane = threadIdx.x % WARP, dim = group * WARP + lane;
    const int end = min((part + 1) * PIECES, (block.live + Kind::PIECE - 1) / Kind::PIECE);
#pragma unroll((TILES == 4 ? 2 : 4) / OCTETS)
    for (int number = part * PIECES; number < end; ++number) {
        const uint4 piece = values.value(number, dim AT);
#pragma unroll
        for (int octet = number * OCTETS; octet < (number + 1) * OCTETS; ++octet) {
            const uint4 all = values.value_octet(piece, octet, dim AT);
            const uint4 b = first_halves(all, block.live - octet * OCTET);
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                const int row = tile * ROWS + fragment_row(lane);
                const uint4 a = load_shared(weights + octet * TILES * ROWS + row AT);
                mma_row_col(c[tile], a.x, a.y, b.x, b.y AT);
                mma_row_col(c[tile], a.z, a.w, b.z, b.w AT);
            }
        }
    }
}

// Adds the parts' sums to those of part 0, in the order of the parts, each lane its own.
template <int TILES, int GROUPS, int PARTS>
DEVICE void join_parts(float (&c)[TILES][8], float* others, int group, int part SITE) {
    const int lane = threadIdx.x % WARP;
    const auto at = [&](int from, int n) {
        return others + (((from - 1) * TILES * 8 + n) * GROUPS + group) * WARP + lane;
    };
    if (part > 0 && part < PARTS) {
#pragma unroll
        for (int n = 0; n < TILES * 8; ++n) store_shared(at(part, n), c[n / 8][n % 8] AT);
    }
    sync_block(AT_ONLY);  // the parts' sums are there
    if (part > 0) return;
#pragma unroll
    for (int n = 0; n < TILES * 8; ++n) {
        for (int from = 1; from < PARTS; ++from) c[n / 8][n % 8] += load_shared(at(from, n) AT);
    }
}

template <class Kind, int D, int TILES>
KERNEL(THREADS, TILES == 1 ? 3 : TILES == 4 && D == 64 ? 1 : 2)
attend_partition(const half* q, const void* keys, const half* key_scales, const void* values,
                 const half* value_scales, const int* starts, const int* counts, const int* table,
                 float* o, float2* stats, float scale, float cap, int window, int W, int H, int HKV,
                 int pages, int slots) {
    constexpr int GROUPS = D / WARP, PARTS = WARPS / GROUPS;  // a group: 32 dimensions
    constexpr int SCALES = Kind::PIECE == KvQ8::PIECE ? D * PAGE / GROUP : 1;
    SHARED(uint4, weights, PARTITION_OCTETS * TILES * ROWS);
    SHARED(float, maxima, WARPS * TILES * ROWS);
    SHARED(float, sums, WARPS * TILES * ROWS);
    SHARED(float, others, PARTS == 1 ? 1 : (PARTS - 1) * TILES * 8 * GROUPS * WARP);
    SHARED(half, staged_keys, SCALES);
    SHARED(half, staged_values, SCALES);

    const Block block = this_block<TILES>({scale, cap, window}, starts, counts, W, H, HKV);
    if (!block.has(0) || block.live <= 0) return;  // the whole block
    const int page = load_constant(table + size_t(block.lane) * pages + block.partition);
    const auto k = plane_of<Kind, D>(keys, key_scales, staged_keys, page, block.head, HKV);
    const auto v = plane_of<Kind, D>(values, value_scales, staged_values, page, block.head, HKV);
    if (Kind::PIECE == KvQ8::PIECE) sync_block();  // the scales are staged

    float s[TILES][8] = {};
    score_keys<Kind, D, TILES>(s, block, k, q);
    across_keys<TILES, false>(maxima, s);
    sync_block();  // all warps' maxima are there
    weigh<TILES>(s, weights, maxima);
    across_keys<TILES, true>(sums, s);
    sync_block();  // all warps' sums and weights are there
    const int row = threadIdx.x;
    if (row < TILES * ROWS && block.has(row)) {
        const float2 stat = {across_warps<TILES, false>(maxima, row),
                             across_warps<TILES, true>(sums, row)};
        store(stats + block.at(row) * slots + blockIdx.y, stat);
    }

    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int group = warp % GROUPS, part = warp / GROUPS;
    float c[TILES][8] = {};
    if (part < PARTS) multiply_values<Kind, D, TILES, PARTS>(c, block, v, weights, group, part);
    if (PARTS > 1) join_parts<TILES, GROUPS, PARTS>(c, others, group, part);
    if (part > 0) return;
#pragma unroll
    for (int n = 0; n < TILES * 8; n += 2) {
        const int each = n / 8 * ROWS + score_row(lane, n % 8);
        if (!block.has(each)) continue;
        float* to = o + (block.at(each) * slots + blockIdx.y) * D;
        store(reinterpret_cast<float2*>(to + group * WARP + score_column(lane, n % 8)),
              float2{c[n / 8][n % 8], c[n / 8][n % 8 + 1]});
    }
}

// --- merging -------------------------------------------------------------------------------------

template <int D>
KERNEL(THREADS, 4)
merge_partitions(const float* o, const float2* stats, const int* starts, const int* counts, half* y,
                 int window, int W, int H, int slots) {
    constexpr int EACH = D / WARP;  // dimensions of a lane
    SHARED(float, parts, WARPS * (D + 1));
    const int head = blockIdx.x, t = blockIdx.y % W, batch_lane = blockIdx.y / W;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    if (t >= load_constant(counts + batch_lane)) return;  // the whole block
    const Scoring scoring = {1.0f, 0.0f, window};
    const int start = load_constant(starts + batch_lane), position = start + t;
    const int lane_first = scoring.first(start) / PARTITION;  // the partition of slot 0
    const int first = scoring.first(position) / PARTITION, last = position / PARTITION;
    const size_t row = (size_t(batch_lane) * W + t) * H + head;
    const float2* mine = stats + row * slots;
    const bool fits = last - lane_first < slots;

    float top = never();
    for (int p = first + lane; fits && p <= last; p += WARP) {
        top = fmaxf(top, load(mine + p - lane_first).x);
    }
    top = warp_max(top);
    float sum = 0.0f, c[EACH] = {};
    for (int p = (first + WARPS - 1 - warp) / WARPS * WARPS + warp; fits && p <= last; p += WARPS) {
        const float2 stat = load(mine + p - lane_first);
        const float factor = exp_f32(stat.x - top);
        sum = fmaf(factor, stat.y, sum);
        const float* from = o + (row * slots + p - lane_first) * D + lane;
#pragma unroll
        for (int j = 0; j < EACH; ++j) c[j] = fmaf(factor, load(from + j * WARP), c[j]);
    }
#pragma unroll
    for (int j = 0; j < EACH; ++j) store_shared(parts + warp * (D + 1) + j * WARP + lane, c[j]);
    if (lane == 0) store_shared(parts + warp * (D + 1) + D, sum);
    sync_block();  // all warps' sums are there
    for (int dim = threadIdx.x; dim < D; dim += THREADS) {
        float numerator = 0.0f, denominator = 0.0f;
        for (int from = 0; from < WARPS; ++from) {
            numerator += load_shared(parts + from * (D + 1) + dim);
            denominator += load_shared(parts + from * (D + 1) + D);
        }
        // Without any partition that fits the slots both are 0, and the result is NaN.
        store(y + row * D + dim, to_f16(numerator / denominator));
    }
}
