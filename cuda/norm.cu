// norm: additions to the residual stream, fused with the RMS norms around them.
// Wrapper: phaseloop/kernels/norm.py.
//
//   d       = delta[t,:]                                  or, with delta_weight,
//             delta[t,k] * rsqrt(mean_k delta[t,k]^2 + epsilon) * delta_weight[k]
//   x[t,:] += d                                           (nothing is added where delta is null)
//   y[t,k]  = x[t,k] * rsqrt(mean_k x[t,k]^2 + epsilon) * weight[k]
//
// Shapes     x, delta: f32 [T, K] row-major, 16-byte aligned, x written only with delta;
//            delta_weight, weight: f32 [K]; y_half: f16 [T, K] or null; y_full: f32 [T, K] or null.
//            K % 4 == 0, K <= 1024 * PASSES.  delta_weight or delta may be null.
// Numerics   f32.  Squares are added in ascending k within a thread, then by block_sum; so a row's
//            bits depend on the row alone.  Relative L2 <= 1e-6 before y is rounded to f16.
// Mapping    a block per row; thread i holds elements 4 i .. 4 i + 3 of every 1024 in registers, so
//            x and delta are read once.
// Roofline   x read and written, delta read, y_half written: 14 B and some 7 flop per element, far
//            below V100's 17 flop/B: bytes bound it.  K = 5120, T = 1: 72 KB, 0.08 us: a launch
//            outweighs it, hence the fusion.  T = 2048: 147 MB, 163 us.
// Measured   not yet, for want of a device.
#include "common.cuh"

constexpr int WARPS = 8, THREADS = WARPS * WARP, PACK = 4;

template <int PASSES>
struct Row {
    float4 packs[PASSES];
};

template <int PASSES>
DEVICE Row<PASSES> load_row(const float* row, int K SITE) {
    Row<PASSES> x;
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
        const int k = (pass * THREADS + int(threadIdx.x)) * PACK;
        x.packs[pass] = k < K ? load(reinterpret_cast<const float4*>(row + k) AT)
                              : float4{0.0f, 0.0f, 0.0f, 0.0f};
    }
    return x;
}

// 1 / root of the mean square of a row.
template <int PASSES>
DEVICE float inverse_rms(const Row<PASSES>& x, int K, float epsilon SITE) {
    float sum = 0.0f;
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
        const float4 p = x.packs[pass];
        sum = fmaf(p.x, p.x, sum);
        sum = fmaf(p.y, p.y, sum);
        sum = fmaf(p.z, p.z, sum);
        sum = fmaf(p.w, p.w, sum);
    }
    return rsqrt_f32(block_sum<WARPS>(sum AT) / float(K) + epsilon);
}

DEVICE float4 weighted(float4 p, float factor, float4 w) {
    return {p.x * factor * w.x, p.y * factor * w.y, p.z * factor * w.z, p.w * factor * w.w};
}

template <int PASSES>
KERNEL(THREADS, PASSES <= 4 ? 4 : PASSES <= 6 ? 3 : PASSES <= 8 ? 2 : 1)
rms_norm(float* x, const float* delta, const float* delta_weight, const float* weight, half* y_half,
         float* y_full, float epsilon, int K) {
    const size_t row = size_t(blockIdx.x) * K;
    Row<PASSES> sums = load_row<PASSES>(x + row, K);
    if (delta) {
        const Row<PASSES> added = load_row<PASSES>(delta + row, K);
        const float factor = delta_weight ? inverse_rms<PASSES>(added, K, epsilon) : 1.0f;
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            const int k = (pass * THREADS + int(threadIdx.x)) * PACK;
            if (k >= K) continue;
            float4 d = added.packs[pass];
            if (delta_weight) {
                const float* w = delta_weight + k;
                d = weighted(d, factor, load_constant(reinterpret_cast<const float4*>(w)));
            }
            float4& sum = sums.packs[pass];
            sum = {sum.x + d.x, sum.y + d.y, sum.z + d.z, sum.w + d.w};
            store(reinterpret_cast<float4*>(x + row + k), sum);
        }
    }
    const float factor = inverse_rms<PASSES>(sums, K, epsilon);
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
        const int k = (pass * THREADS + int(threadIdx.x)) * PACK;
        if (k >= K) continue;
        const float4 w = load_constant(reinterpret_cast<const float4*>(weight + k));
        const float4 y = weighted(sums.packs[pass], factor, w);
        if (y_full) store(reinterpret_cast<float4*>(y_full + row + k), y);
        if (y_half) {
            const uint2 pairs = {pack2(to_f16(y.x), to_f16(y.y)), pack2(to_f16(y.z), to_f16(y.w))};
            store(reinterpret_cast<uint2*>(y_half + row + k), pairs);
        }
    }
}
