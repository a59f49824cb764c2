// prefill: many rows of activations times a quantised matrix, weights expanded on the way.
// Wrapper: phaseloop/kernels/prefill.py.
//
//   y[m,n] = sum_k x[m,k] * w[n,k] + bias[n] + residual[m,n]
//
// Shapes     x: f16 [M, K], 16-byte aligned; w: planes of [N, K] (phaseloop/kernels/repack.py);
//            bias: f32 [N] or null; residual: f32 [M, N] or null, may be y; y: f32 [M, N].
//            K % 32 == 0, any M and N.
// Numerics   w as halves (quant.cuh), products and sums in f32, in ascending k.  Oracle: GGML's
//            dequantised weights in f64; relative L2 <= 1e-3.  A row's bits depend on its own
//            activations and on w alone, so a prompt may be cut anywhere.  They are not those of
//            skinny.cu, which splits K.
// Mapping    A block is 128 rows m by 128 columns n.  Strips of 32 k of both pass through shared
//            memory, two buffers of each: while one is multiplied the next is fetched, expanded
//            once per block, and stored.  Eight warps, 2 by 4, have 64 by 32 each; a warp's four
//            quad-pairs, 2 by 2, share fragments pairwise: 6 loads of 16 bytes feed 16 mma.
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

// Two pieces of x per thread, of rows thread / 4 and 64 over: where these begin.
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

DEVICE void finish(float sum, const float* bias, const float* residual, float* y, int m, int n,
                   int M, int N SITE) {
    if (m >= M || n >= N) return;
    if (bias) sum += load_constant(bias + n AT);
    const size_t element = size_t(m) * N + n;
    if (residual) sum += load(residual + element AT);
    store(y + element, sum AT);
}

template <class Type>
KERNEL(THREADS, 2)
prefill(const half* x, const uint4* weight, const float* bias, const float* residual, float* y,
        int M, int N, int K) {
    constexpr int STRIPS = Type::UNIT / STRIP;
    SHARED(uint4, rows, 2 * PIECES);
    SHARED(uint4, columns, 2 * PIECES);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int groups = (N + WARP - 1) / WARP, strip_count = K / STRIP;
    // Groups beyond the last repeat it, and are not stored.
    const int group = min(int(blockIdx.y) * (TILE / WARP) + warp / 2, groups - 1);
    const Planes<Type> planes(weight, group, groups, K / Type::BLOCK, lane);
    const int first = blockIdx.x * TILE;
    const int first_m = warp % 2 * WARP_M, first_n = warp / 2 * WARP_N;

    int begins[2];  // rows beyond M repeat the last
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int m = min(first + int(threadIdx.x) / STRIP_OCTETS + i * (TILE / 2), M - 1);
        begins[i] = m * K + int(threadIdx.x) % STRIP_OCTETS * OCTET;
    }
    const int r = (lane & 3) + (lane >= 16 ? 4 : 0);
    int row = staged_at(first_m + block_row(lane >> 2 & 1, r));
    int column = staged_at(first_n + block_row(lane >> 3 & 1, r));

    float c[M_BLOCKS][N_BLOCKS][8] = {};
    const auto fetch = [&](int number) {
        const int unit = number / STRIPS;
        return HalfStrip<Type>(Type::fetch(planes, unit), unit, number % STRIPS, part_of_strip());
    };
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

    const int r_of_sum = (lane & 1) + (lane >= 16 ? 4 : 0);
#pragma unroll
    for (int i = 0; i < M_BLOCKS; ++i) {
#pragma unroll
        for (int j = 0; j < N_BLOCKS; ++j) {
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                const int m = first_m + 16 * i + block_row(lane >> 2 & 1, r_of_sum + (e & 2));
                const int column = (e & 4) + (lane & 2) + (e & 1);
                const int n = first_n + 16 * j + block_row(lane >> 3 & 1, column);
                finish(c[i][j][e], bias, residual, y, first + m, blockIdx.y * TILE + n, M, N);
            }
        }
    }
}
