// lora: what low-rank adapters add to a product, each row by an adapter of its own.
// Wrapper: phaseloop/kernels/lora.py.
//
//   narrow   h[m,r] = sum_k a[i,r,k] * x[m,k],   i = adapters[m], r < ranks[i]
//   widen    y[m,n] += scales[m] * factors[i] * sum_r b[i,n,r] * h[m,r]
//
// Shapes     x: f16 [M, K], K % 32 == 0; a: f16 [C, R, K], C adapters, R % 8 == 0, R <= 64;
//            b: f16 [C, R / 8, N, 8], the eight ranks of a piece adjacent; ranks: i32 [C], <= R;
//            factors: f32 [C]; adapters: i32 [M], below C, or negative for none; scales: f32 [M];
//            h: f32 [M, R], of which what lies beyond a row's rank is not written; y: f32 [M, N].
// Numerics   f32 sums: of h over a lane's pieces in ascending k, then over lanes at distances 16,
//            8, 4, 2, 1; of y in ascending r.  Oracle in f64; relative L2 <= 1e-5 of what is
//            added.  A row's bits depend on itself and its adapter alone; a row without one, or
//            whose adapter has rank 0 here, is neither read nor written.
// Mapping    narrow: a block is ROWS rows by 8 ranks, a warp a rank; its lanes share K.  widen: a
//            block is ROWS rows by 256 columns, a thread a column.  A piece of a or b serves all
//            neighbouring rows of one adapter, which in a prompt are all rows.
// Roofline   bytes of a and b: rank 16, N = K = 4096: 0.26 MB per adapter, 0.3 us, less than two
//            launches.  M = 2048 rows: 0.54 GFLOP on the FP32 units, 34 us.
// Measured   not yet, for want of a device.
#include "common.cuh"

constexpr int WARPS = 8, THREADS = WARPS * WARP;
constexpr int ROWS = 4, OCTET = 8;

// sum += two halves of each times the other, the lower first.
DEVICE float add_products(float sum, u32 a, u32 b) {
    sum = fmaf(to_f32(low_of(a)), to_f32(low_of(b)), sum);
    return fmaf(to_f32(high_of(a)), to_f32(high_of(b)), sum);
}

// A row's adapter, or -1 where there is nothing to add.
DEVICE int adapter_of(const int* adapters, const int* ranks, int m, int M SITE) {
    const int adapter = m < M ? load_constant(adapters + m AT) : -1;
    return adapter >= 0 && load_constant(ranks + adapter AT) > 0 ? adapter : -1;
}

KERNEL(THREADS, 4)
narrow(const half* x, const half* a, const int* adapters, const int* ranks, float* h, int M, int K,
       int R) {
    const int lane = threadIdx.x % WARP, r = blockIdx.x * WARPS + threadIdx.x / WARP;
    const int first = blockIdx.y * ROWS;
    int adapter[ROWS];
    float sums[ROWS] = {};
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
        const int i = adapter_of(adapters, ranks, first + row, M);
        adapter[row] = i >= 0 && r < load_constant(ranks + i) ? i : -1;
    }
    for (int k = lane * OCTET; k < K; k += WARP * OCTET) {
        uint4 piece = {0, 0, 0, 0};
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            if (adapter[row] < 0) continue;  // the same for a whole warp
            if (row == 0 || adapter[row] != adapter[row - 1]) {
                const half* from = a + (size_t(adapter[row]) * R + r) * K + k;
                piece = load_constant(reinterpret_cast<const uint4*>(from));
            }
            const half* from = x + size_t(first + row) * K + k;
            const uint4 mine = load_constant(reinterpret_cast<const uint4*>(from));
            float sum = add_products(sums[row], piece.x, mine.x);
            sum = add_products(sum, piece.y, mine.y);
            sum = add_products(sum, piece.z, mine.z);
            sums[row] = add_products(sum, piece.w, mine.w);
        }
    }
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
        const float sum = warp_sum(sums[row]);
        if (lane == 0 && adapter[row] >= 0) store(h + (first + row) * R + r, sum);
    }
}

KERNEL(THREADS, 4)
widen(const float* h, const half* b, const int* adapters, const float* scales, const int* ranks,
      const float* factors, float* y, int M, int N, int R) {
    const int n = blockIdx.x * THREADS + threadIdx.x, first = blockIdx.y * ROWS;
    if (n >= N) return;  // nobody is waited for
    int adapter[ROWS];
    float sums[ROWS] = {};
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
        adapter[row] = adapter_of(adapters, ranks, first + row, M);
    }
    for (int r = 0; r < R; r += OCTET) {
        uint4 piece = {0, 0, 0, 0};
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            if (adapter[row] < 0) continue;
            if (row == 0 || adapter[row] != adapter[row - 1]) {
                const half* from = b + ((size_t(adapter[row]) * R + r) * N + size_t(n) * OCTET);
                piece = load_constant(reinterpret_cast<const uint4*>(from));
            }
            const u32 pairs[OCTET / 2] = {piece.x, piece.y, piece.z, piece.w};
            const int rank = load_constant(ranks + adapter[row]);
#pragma unroll
            for (int i = 0; i < OCTET; ++i) {
                if (r + i >= rank) break;
                const half weight = i % 2 ? high_of(pairs[i / 2]) : low_of(pairs[i / 2]);
                const float narrowed = load_constant(h + (first + row) * R + r + i);
                sums[row] = fmaf(to_f32(weight), narrowed, sums[row]);
            }
        }
    }
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
        if (adapter[row] < 0) continue;
        const float scale = load_constant(scales + first + row) *
                            load_constant(factors + adapter[row]);
        float* to = y + (size_t(first + row) * N + n);
        store(to, fmaf(scale, sums[row], load(to)));
    }
}
