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

// Where octet o of a staged row lies.  Two rows of 64 bytes fill the banks; the exclusive or
// spreads the eight rows that a quarter-warp reads over all of them.
DEVICE int staged_at(int row, int o) { return row * STRIP_OCTETS + (o ^ (row >> 1 & 3)); }

// Of a block of 16 rows, which one is r (0 to 7) of the first or second quad-pair: rows 0 to 3 and
// 8 to 11 are the first's, so that what a quarter-warp reads is 8 neighbours.
DEVICE int block_row(int quad_pair, int r) { return quad_pair * 4 + (r & 3) + (r >> 2) * 8; }

// Two pieces of x per thread: row m's octet o, for m = thread / 4 and 64 over.
struct Fetched { uint4 pieces[2]; };
DEVICE Fetched fetch_rows(const half* x, int first, int k, int M, int K SITE) {
    Fetched fetched;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int m = min(first + int(threadIdx.x) / STRIP_OCTETS + i * (TILE / 2), M - 1);
        const half* from = x + (m * K + k + int(threadIdx.x) % STRIP_OCTETS * OCTET);
        fetched.pieces[i] = load_constant(reinterpret_cast<const uint4*>(from) AT);
    }
    return fetched;
}
DEVICE void stage_rows(uint4* staged, const Fetched& fetched SITE) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = threadIdx.x / STRIP_OCTETS + i * (TILE / 2);
        store_shared(staged + staged_at(row, threadIdx.x % STRIP_OCTETS), fetched.pieces[i] AT);
    }
}

// Two octets of one column of w per thread; two warps share a group of 32 columns.  `scales` are
// those of the strip's halves.
template <class Type>
DEVICE void stage_columns(uint4* staged, const typename Type::Raw& raw, int strip,
                          const half2 (&scales)[2] SITE) {
    const int column = threadIdx.x / (2 * WARP) * WARP + threadIdx.x % WARP;
    const bool is_second = threadIdx.x / WARP % 2;
#pragma unroll
    for (int octet = 0; octet < STRIP_OCTETS; ++octet) {
        if (octet / 2 != is_second) continue;  // the same for a whole warp
        sync_warp();  // and one octet at a time, for the registers' sake
        u32 pairs[4];
        expand<Type>(raw, strip, octet, scales[octet / Type::STEP_OCTETS], pairs);
        const uint4 piece{pairs[0], pairs[1], pairs[2], pairs[3]};
        store_shared(staged + staged_at(column, octet), piece AT);
    }
}

// One strip of the warp's 64 by 32: c += A B.
DEVICE void multiply(float (&c)[M_BLOCKS][N_BLOCKS][8], const uint4* rows, const uint4* columns,
                     int first_m, int first_n SITE) {
    const int lane = threadIdx.x % WARP, r = (lane & 3) + (lane >= 16 ? 4 : 0);
    const int m = first_m + block_row(lane >> 2 & 1, r), n = first_n + block_row(lane >> 3 & 1, r);
#pragma unroll
    for (int octet = 0; octet < STRIP_OCTETS; ++octet) {
        sync_warp();  // what the compiler loads ahead fits the registers
        uint4 b[N_BLOCKS];
#pragma unroll
        for (int j = 0; j < N_BLOCKS; ++j) {
            b[j] = load_shared(columns + staged_at(n + 16 * j, octet) AT);
        }
#pragma unroll
        for (int i = 0; i < M_BLOCKS; ++i) {
            const uint4 a = load_shared(rows + staged_at(m + 16 * i, octet) AT);
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

    float c[M_BLOCKS][N_BLOCKS][8] = {};
    stage_rows(rows, fetch_rows(x, first, 0, M, K));
    {
        const typename Type::Raw raw = Type::fetch(planes, 0);
        const half2 scales[2] = {scale_of<Type>(raw, 0, 0, 0), scale_of<Type>(raw, 0, 0, 2)};
        stage_columns<Type>(columns, raw, 0, scales);
    }
    for (int unit = 0; unit * STRIPS < strip_count; ++unit) {
#pragma unroll
        for (int strip = 0; strip < STRIPS; ++strip) {
            const int number = unit * STRIPS + strip, next = number + 1;
            if (number >= strip_count) break;
            sync_block();  // this strip is staged, and nobody reads the other buffers any more
            // The next strip's weights are under way meanwhile; at the end the last's, in vain.
            const int ahead = min(next, strip_count - 1);
            const typename Type::Raw raw = Type::fetch(planes, ahead / STRIPS);
            if (next < strip_count) {
                stage_rows(rows + next % 2 * PIECES, fetch_rows(x, first, next * STRIP, M, K));
            }
            // Scales take fewer registers than what they are made of.
            const half2 scales[2] = {
                scale_of<Type>(raw, ahead / STRIPS, (strip + 1) % STRIPS, 0),
                scale_of<Type>(raw, ahead / STRIPS, (strip + 1) % STRIPS, 2)};
            multiply(c, rows + number % 2 * PIECES, columns + number % 2 * PIECES, first_m,
                     first_n);
            if (next < strip_count) {
                stage_columns<Type>(columns + next % 2 * PIECES, raw, (strip + 1) % STRIPS, scales);
            }
        }
    }

    const int r = (lane & 1) + (lane >= 16 ? 4 : 0);
#pragma unroll
    for (int i = 0; i < M_BLOCKS; ++i) {
#pragma unroll
        for (int j = 0; j < N_BLOCKS; ++j) {
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                const int m = first_m + 16 * i + block_row(lane >> 2 & 1, r + (e & 2));
                const int column = (e & 4) + (lane & 2) + (e & 1);
                const int n = first_n + 16 * j + block_row(lane >> 3 & 1, column);
                finish(c[i][j][e], bias, residual, y, first + m, blockIdx.y * TILE + n, M, N);
            }
        }
    }
}
