// skinny_f32: rows of activations times a matrix kept in f32: routers of experts, weights that f16
// cannot hold.  Wrapper: phaseloop/kernels/skinny.py.
//
//   y[m,n] = sum_k x[m,k] * w[n,k] + bias[n] + residual[m,n]
//
// Shapes     x: f32 [M, K], 16-byte aligned; w: planes of F32 [N, K] (phaseloop/kernels/repack.py);
//            bias: f32 [N] or null; residual: f32 [M, N] or null, may be y; y: f32 [M, N].
//            K % 32 == 0, any M and N.
// Numerics   f32 throughout, fused multiply-adds in ascending k within each warp's part, the
//            parts added in the order of the warps.  Relative L2 <= 1e-5.  A row's bits do not
//            depend on M.
// Mapping    a block is 32 columns n by 8 rows m.  Eight warps share K as in skinny.cu: warp i
//            takes strips i, i + 8, ... of 32; a lane owns a column and keeps 8 rows' sums.  x is
//            read by all lanes of a warp at the same address, which is one transaction.
// Roofline   4 B per weight and 16 flop for 8 rows: 4 flop/B, below V100's 17, so the weights bound
//            it.  A router of 128 experts, K = 4096: 2.1 MB, 2.3 us.
// Measured   not yet, for want of a device.
#include "common.cuh"

constexpr int K_WARPS = 8, ROWS = 8;
constexpr int STRIP = 32, PIECES = STRIP / 4;  // 16-byte pieces of a lane's strip

KERNEL(K_WARPS * WARP, 2)
skinny_f32(const float* x, const uint4* weight, const float* bias, const float* residual, float* y,
           int M, int N, int K) {
    SHARED(float, partial, K_WARPS * ROWS * WARP);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int strips = K / STRIP, first = blockIdx.y * ROWS;
    const uint4* mine = weight + size_t(blockIdx.x) * strips * PIECES * WARP + lane;
    int rows[ROWS];  // where those of x begin; beyond M the last repeats, and is not stored
#pragma unroll
    for (int row = 0; row < ROWS; ++row) rows[row] = min(first + row, M - 1) * K;
    float sums[ROWS] = {};
    for (int strip = warp; strip < strips; strip += K_WARPS) {
#pragma unroll 2
        for (int piece = 0; piece < PIECES; ++piece) {
            const uint4 bits = load_once(mine + (size_t(strip) * PIECES + piece) * WARP);
            const float w[4] = {f32_of(bits.x), f32_of(bits.y), f32_of(bits.z), f32_of(bits.w)};
#pragma unroll
            for (int row = 0; row < ROWS; ++row) {
                const float* from = x + (rows[row] + strip * STRIP + piece * 4);
                const float4 a = load_constant(reinterpret_cast<const float4*>(from));
                float sum = fmaf(a.x, w[0], sums[row]);
                sum = fmaf(a.y, w[1], sum);
                sum = fmaf(a.z, w[2], sum);
                sums[row] = fmaf(a.w, w[3], sum);
            }
        }
    }
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
        store_shared(partial + (warp * ROWS + row) * WARP + lane, sums[row]);
    }
    sync_block();  // all warps' parts are there
    const int m = first + warp, n = blockIdx.x * WARP + lane;  // as many warps as rows
    if (m >= M || n >= N) return;
    float sum = load_shared(partial + warp * WARP + lane);
    for (int part = 1; part < K_WARPS; ++part) {
        sum += load_shared(partial + (part * ROWS + warp) * WARP + lane);
    }
    if (bias) sum += load_constant(bias + n);
    const size_t element = size_t(m) * N + n;
    if (residual) sum += load(residual + element);
    store(y + element, sum);
}
