// activation: elementwise operations that no other kernel takes along.
// Wrapper: phaseloop/kernels/activation.py.
//
//   gated      y[t,f] = activate(gate[t,f]) * up[t,f]
//   gate_heads y[t,h,:] = sigmoid(projected[t,h,D:]) * y[t,h,:], in place
//   soft_cap   x[i] = cap * tanh(x[i] / cap), in place; NaN where x[i] is infinite
//   Silu(x) = x / (1 + e^-x); Gelu(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))
//
// Shapes     gate, up: f32 [T, F]; y: f16 [T, F]; x: f32 [count].  F and count are multiples of 4,
//            all arrays 16-byte aligned.  gate_heads: projected f32 [rows, 2 D], a head's queries
//            and then its gates; y f16 [rows, D], D % 4 == 0; a row is a token's head.
// Numerics   f32; y is rounded once, to infinity where f16 cannot hold it.  Relative 1e-5 before.
// Mapping    a thread per 4 elements.
// Roofline   gated: 10 B per element, soft_cap 8 B: bytes bound both.  F = 17408, T = 1: 0.17 MB,
//            a launch outweighs it; T = 2048: 357 MB, 396 us.
// Measured   not yet, for want of a device.
#include "common.cuh"

constexpr int THREADS = 256, PACK = 4;

struct Silu {
    static DEVICE float of(float x) { return x / (1.0f + exp_f32(-x)); }
};
struct Gelu {
    static DEVICE float of(float x) {
        // (1 + tanh u) / 2 = 1 / (1 + e^-2u), which cancels nothing where u is far below 0.
        const float twice = 1.5957691216057308f * fmaf(0.044715f * x * x, x, x);
        return x / (1.0f + exp_f32(-twice));
    }
};

template <class Activation>
KERNEL(THREADS, 8)
gated(const float* gate, const float* up, half* y, int F) {
    const int f = (blockIdx.x * THREADS + threadIdx.x) * PACK;
    if (f >= F) return;
    const size_t at = size_t(blockIdx.y) * F + f;
    const float4 g = load_constant(reinterpret_cast<const float4*>(gate + at));
    const float4 u = load_constant(reinterpret_cast<const float4*>(up + at));
    const uint2 pairs = {
        pack2(to_f16(Activation::of(g.x) * u.x), to_f16(Activation::of(g.y) * u.y)),
        pack2(to_f16(Activation::of(g.z) * u.z), to_f16(Activation::of(g.w) * u.w))};
    store(reinterpret_cast<uint2*>(y + at), pairs);
}

DEVICE float sigmoid(float x) { return 1.0f / (1.0f + exp_f32(-x)); }

KERNEL(THREADS, 8)
gate_heads(const float* projected, half* y, int D, int count) {
    const int i = (blockIdx.x * THREADS + threadIdx.x) * PACK;
    if (i >= count) return;
    const float* gates = projected + size_t(i / D) * 2 * D + D + i % D;
    const float4 g = load_constant(reinterpret_cast<const float4*>(gates));
    uint2* at = reinterpret_cast<uint2*>(y + i);
    const uint2 pairs = load(at);
    store(at, uint2{pack2(to_f16(sigmoid(g.x) * to_f32(low_of(pairs.x))),
                          to_f16(sigmoid(g.y) * to_f32(high_of(pairs.x)))),
                    pack2(to_f16(sigmoid(g.z) * to_f32(low_of(pairs.y))),
                          to_f16(sigmoid(g.w) * to_f32(high_of(pairs.y))))});
}

// x - x is 0, but for an infinity, which the cap would hide from those who look for it.
DEVICE float capped(float x, float cap) { return cap * tanhf(x / cap) + (x - x); }

KERNEL(THREADS, 8)
soft_cap(float* x, float cap, int count) {
    const int i = (blockIdx.x * THREADS + threadIdx.x) * PACK;
    if (i >= count) return;
    float4* at = reinterpret_cast<float4*>(x + i);
    const float4 v = load(at);
    store(at, float4{capped(v.x, cap), capped(v.y, cap), capped(v.z, cap), capped(v.w, cap)});
}
