// gather: rows of a quantised matrix, dequantised: what an embedding looks up.
// Wrapper: phaseloop/kernels/gather.py.
//
//   y[t,k] = scale * w[tokens[t],k]
//
// Shapes     tokens: i32 [T], each in [0, N); w: planes of [N, K] (phaseloop/kernels/repack.py);
//            y: f32 [T, K].  K % 32 == 0.
// Numerics   f32, the operations of GGML's dequantisation: with scale 1 the bits are the same.
// Mapping    a block per token; a thread dequantises strips of 32 columns.
// Roofline   a row of K = 5120 is 3 KB of Q4_K and 20 KB of f32: one launch, 2 us, outweighs it.
//            A lane's pieces are 512 bytes apart, so half of each 32-byte sector is not its own.
// Measured   not yet, for want of a device.
#include "quant.cuh"

constexpr int THREADS = 128;
constexpr int STRIP = 32, OCTET = 8;

template <class Type>
KERNEL(THREADS, 4)
gather(const int* tokens, const uint4* weight, float* y, float scale, int N, int K) {
    const int token = load_constant(tokens + blockIdx.x);
    const Planes<Type> planes(weight, token / WARP, (N + WARP - 1) / WARP, K / Type::BLOCK,
                              token % WARP);
    for (int k = threadIdx.x * STRIP; k < K; k += THREADS * STRIP) {
        const int unit = k / Type::UNIT, strip = k % Type::UNIT / STRIP;
        const typename Type::Raw raw = Type::fetch(planes, unit);
        for (int octet = 0; octet < STRIP / OCTET; ++octet) {
            float w[8];
            expand_f32<Type>(raw, unit, strip, octet, w);
            float4* to = reinterpret_cast<float4*>(y + size_t(blockIdx.x) * K + k + octet * OCTET);
            store(to, float4{w[0] * scale, w[1] * scale, w[2] * scale, w[3] * scale});
            store(to + 1, float4{w[4] * scale, w[5] * scale, w[6] * scale, w[7] * scale});
        }
    }
}
