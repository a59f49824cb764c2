// prefill: many rows of activations times a quantised matrix, weights expanded on the way.
// Wrapper: phaseloop/kernels/prefill.py.
//
//   prefill           y[m,n] = sum_k x[m,k] * w[n,k] + bias[n] + residual[m,n]
//   prefill_experts   y[i,n] = sum_k x[row(i),k] * w[expert(i),n,k], i counting assignments in
//                     moe.cu's order; row(i) = order[i] / U, the row that was assigned, or i where
//                     order is null
//
// Shapes     x: f16 [M, K], 16-byte aligned; w: planes of [N, K] (phaseloop/kernels/repack.py);
//            bias: f32 [N] or null; residual: f32 [M, N] or null, may be y; y: f32 [M, N].
//            K % 32 == 0, any M and N.  prefill_experts: w: planes of [E N, K], one expert after
//            the other, 32 | N; tiles: i32 [tiles, 4] of moe.cu, each at most 128 assignments of
//            one expert; y: f32 [T U, N].
// Numerics   w as halves (quant.cuh), products and sums in f32, in ascending k.  Oracle: GGML's
//            dequantised weights in f64; relative L2 <= 1e-3.  A row's bits depend on its own
//            activations and on w alone, so a prompt may be cut anywhere, in both kernels alike.
//            They are not those of skinny.cu and experts.cu, which split K.
// Mapping    A block is 128 rows m by 128 columns n.  Strips of 32 k of both pass through shared
//            memory, two buffers of each: while one is multiplied the next is fetched, expanded
//            once per block, and stored.  Eight warps, 2 by 4, have 64 by 32 each; a warp's four
//            quad-pairs, 2 by 2, share fragments pairwise: 6 loads of 16 bytes feed 16 mma.
//            prefill_experts gathers x as it is fetched; a tile's empty rows are computed in vain,
//            and tiles beyond the last end at once.
// Roofline   M = 2048, N = K = 4096: 69 GFLOP, 0.76 ms at 90 TFLOP/s; Q4_K weights: 9.4 MB, 10 us.
//            Per strip a scheduler has 128 mma (1075 cycles), its share of shared memory's loads is
//            768, of expansion some 200 instructions.
// Measured   not yet, for want of a device.
#include "quant.cuh"

constexpr int TILE = 128;                  // rows m and columns n of a block
constexpr int STRIP = 32, OCTET = 8, STRIP_OCTETS = STRIP / OCTET;
constexpr int THREADS = 256;
constexpr int PIECES = TILE * STRIP_OCTETS;  // of 16 bytes in a staged strip
constexpr int WARP_M = 64, WARP_N = 32;
constexpr int M_BLOCKS = WARP_M / 16, N_BLOCKS = WARP_N / 16;  // 16 rows or columns: two quad-pairs

// Where octet 0 of a staged row lies; octet o is at the exclusive or of that and o.  Two rows of 64
// bytes fill the banks; so the eight rows that a quarter-warp reads are spread over all of them.
DEVICE int staged_at(int row) { return row * STRIP_OCTETS + (row >> 1 & 3); }

// Of a block of 16 rows, which one is r (0 to 7) of the first or second quad-pair: rows 0 to 3 and
// 8 to 11 are the first's, so that what a quarter-warp reads is 8 neighbours.
DEVICE int block_row(int quad_pair, int r) { return quad_pair * 4 + (r & 3) + (r >> 2) * 8; }

// The rows and columns that the warp multiplies begin here.
DEVICE int first_row() { return threadIdx.x / WARP % 2 * WARP_M; }
DEVICE int first_column() { return threadIdx.x / WARP / 2 * WARP_N; }

// A thread fetches one piece each of two rows of x, at columns fetched_k() of a strip and on.
DEVICE int fetched_row(int i) { return threadIdx.x / STRIP_OCTETS + i * (TILE / 2); }
DEVICE int fetched_k() { return threadIdx.x % STRIP_OCTETS * OCTET; }

// `begins` are where that is, in the first strip.
struct Fetched { uint4 pieces[2]; };
DEVICE Fetched fetch_rows(const half* x, const int (&begins)[2], int k SITE) {
    Fetched fetched;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const half* from = x + (begins[i] + k);
        fetched.pieces[i] = load_constant(reinterpret_cast<const uint4*>(from) AT);
    }
    return fetched;
}
DEVICE void stage_rows(uint4* staged, const Fetched& fetched SITE) {
    const int row = threadIdx.x / STRIP_OCTETS;
    uint4* to = staged + (staged_at(row) ^ int(threadIdx.x) % STRIP_OCTETS);
    store_shared(to, fetched.pieces[0] AT);
    store_shared(to + TILE / 2 * STRIP_OCTETS, fetched.pieces[1] AT);
}

// Two octets of one column of w per thread; two warps share a group of 32 columns.
DEVICE int part_of_strip() { return threadIdx.x / WARP % 2; }

template <class Type>
DEVICE void stage_columns(uint4* staged, const HalfStrip<Type>& half SITE) {
    const int column = threadIdx.x / (2 * WARP) * WARP + threadIdx.x % WARP;
    const int at = staged_at(column) ^ 2 * part_of_strip();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        sync_warp();  // one octet at a time, for the registers' sake
        store_shared(staged + (at ^ i), half.expanded(i) AT);
    }
}

// One strip of the warp's 64 by 32: c += A B, of rows and columns of which the lane's first ones
// are staged at `row` and `column`.
DEVICE void multiply(float (&c)[M_BLOCKS][N_BLOCKS][8], const uint4* rows, const uint4* columns,
                     int row, int column SITE) {
#pragma unroll 2  // what the compiler loads ahead fits the registers
    for (int octet = 0; octet < STRIP_OCTETS; ++octet) {
        uint4 b[N_BLOCKS];
#pragma unroll
        for (int j = 0; j < N_BLOCKS; ++j) {
            b[j] = load_shared(columns + (column ^ octet) + 16 * j * STRIP_OCTETS AT);
        }
#pragma unroll
        for (int i = 0; i < M_BLOCKS; ++i) {
            const uint4 a = load_shared(rows + (row ^ octet) + 16 * i * STRIP_OCTETS AT);
#pragma unroll
            for (int j = 0; j < N_BLOCKS; ++j) {
                mma_row_col(c[i][j], a.x, a.y, b[j].x, b[j].y AT);
                mma_row_col(c[i][j], a.z, a.w, b[j].z, b[j].w AT);
            }
        }
    }
}

// The block's sums over K.  `begins` says where the thread's two rows of x begin.
template <class Type>
DEVICE void multiply_tile(float (&c)[M_BLOCKS][N_BLOCKS][8], const half* x, const int (&begins)[2],
                          const Planes<Type>& planes, int K) {
    constexpr int STRIPS = Type::UNIT / STRIP;
    SHARED(uint4, rows, 2 * PIECES);
    SHARED(uint4, columns, 2 * PIECES);
    const int lane = threadIdx.x % WARP, r = (lane & 3) + (lane >= 16 ? 4 : 0);
    int row = staged_at(first_row() + block_row(lane >> 2 & 1, r));
    int column = staged_at(first_column() + block_row(lane >> 3 & 1, r));
    const auto fetch = [&](int number) {
        const int unit = number / STRIPS;
        return HalfStrip<Type>(Type::fetch(planes, unit), unit, number % STRIPS, part_of_strip());
    };
    const int strip_count = K / STRIP;
    stage_rows(rows, fetch_rows(x, begins, 0));
    stage_columns<Type>(columns, fetch(0));
    for (int number = 0; number < strip_count; ++number) {
        sync_block();  // this strip is staged, and nobody reads the other buffers any more
        // The next strip is under way meanwhile; at the end the last once more, in vain.
        const int next = min(number + 1, strip_count - 1), other = (number + 1) % 2 * PIECES;
        const HalfStrip<Type> half = fetch(next);
        stage_rows(rows + other, fetch_rows(x, begins, next * STRIP));
        multiply(c, rows, columns, row, column);
        stage_columns<Type>(columns + other, half);
        row ^= PIECES, column ^= PIECES;  // the other buffers
    }
}

// Calls take(m, n, sum) for each of the thread's sums, m and n counting within the block's tile.
template <class Take>
DEVICE void for_each_sum(const float (&c)[M_BLOCKS][N_BLOCKS][8], const Take& take) {
    const int lane = threadIdx.x % WARP, r = (lane & 1) + (lane >= 16 ? 4 : 0);
#pragma unroll
    for (int i = 0; i < M_BLOCKS; ++i) {
#pragma unroll
        for (int j = 0; j < N_BLOCKS; ++j) {
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                const int m = 16 * i + block_row(lane >> 2 & 1, r + (e & 2));
                const int column = (e & 4) + (lane & 2) + (e & 1);
                const int n = 16 * j + block_row(lane >> 3 & 1, column);
                take(first_row() + m, first_column() + n, c[i][j][e]);
            }
        }
    }
}

// Of a matrix of `groups` row groups, the one whose columns the warp stages; groups beyond the last
// repeat it, and are not stored.
DEVICE int group_of(int groups) {
    return min(int(blockIdx.y) * (TILE / WARP) + int(threadIdx.x) / (2 * WARP), groups - 1);
}

template <class Type>
KERNEL(THREADS, 2)
prefill(const half* x, const uint4* weight, const float* bias, const float* residual, float* y,
        int M, int N, int K) {
    const int groups = (N + WARP - 1) / WARP;
    const Planes<Type> planes(weight, group_of(groups), groups, K / Type::BLOCK,
                              threadIdx.x % WARP);
    const int first = blockIdx.x * TILE;
    int begins[2];  // rows beyond M repeat the last
#pragma unroll
    for (int i = 0; i < 2; ++i) begins[i] = min(first + fetched_row(i), M - 1) * K + fetched_k();
    float c[M_BLOCKS][N_BLOCKS][8] = {};
    multiply_tile<Type>(c, x, begins, planes, K);
    for_each_sum(c, [&](int row, int column, float sum) {
        const int m = first + row, n = blockIdx.y * TILE + column;
        if (m >= M || n >= N) return;
        if (bias) sum += load_constant(bias + n);
        const size_t element = size_t(m) * N + n;
        if (residual) sum += load(residual + element);
        store(y + element, sum);
    });
}

template <class Type>
KERNEL(THREADS, 2)
prefill_experts(const half* x, const uint4* weight, const int* order, const int4* tiles, float* y,
                int U, int E, int N, int K) {
    const int4 tile = load_constant(tiles + blockIdx.x);  // expert, first, count
    if (tile.x < 0) return;                               // the whole block
    const int groups = N / WARP;
    const Planes<Type> planes(weight, tile.x * groups + group_of(groups), E * groups,
                              K / Type::BLOCK, threadIdx.x % WARP);
    int begins[2];  // rows beyond the last repeat it
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const int i = tile.y + min(fetched_row(j), tile.z - 1);
        begins[j] = (order ? load_constant(order + i) / U : i) * K + fetched_k();
    }
    float c[M_BLOCKS][N_BLOCKS][8] = {};
    multiply_tile<Type>(c, x, begins, planes, K);
    for_each_sum(c, [&](int row, int column, float sum) {
        const int n = blockIdx.y * TILE + column;
        if (row < tile.z && n < N) store(y + (size_t(tile.y + row) * N + n), sum);
    });
}
