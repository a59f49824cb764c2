// rows: what becomes of rows between the other kernels, where none of them takes it along.
// Wrapper: phaseloop/kernels/rows.py.
//
//   take    y[i,:] = x[rows[i],:]
//   add     y[i] = a[i] + b[i]
//   narrow  y[i] = x[i], as a half; widen y[i] = x[i], as a float
//
// Shapes     take: x, y: rows of `words` pieces of 16 bytes, rows: i32, each a row of x; add: f32;
//            narrow: f32 to f16; widen: f16 to f32.  count is a multiple of 4, y is no input, all
//            arrays 16-byte aligned.
// Numerics   add in f32; narrow rounds to nearest, to infinity where f16 cannot hold it.
// Mapping    a thread per piece of 16 bytes, or per 4 elements.
// Roofline   8 B per f32 element taken, 12 B added, 6 B converted: bytes bound all. K = 5120, T = 1
//            some 60 KB, a launch outweighs it; T = 2048: add 126 MB, 140 us.
// Measured   not yet, for want of a device.
#include "common.cuh"

constexpr int THREADS = 256;
constexpr int PACK = 4;

KERNEL(THREADS, 8)
take(const uint4* x, const int* rows, uint4* y, int words) {
    const int word = blockIdx.x * THREADS + threadIdx.x;
    if (word >= words) return;
    const size_t from = size_t(load_constant(rows + blockIdx.y)) * words;
    store(y + size_t(blockIdx.y) * words + word, load_constant(x + from + word));
}

KERNEL(THREADS, 8)
add(const float* a, const float* b, float* y, int count) {
    const int i = (blockIdx.x * THREADS + threadIdx.x) * PACK;
    if (i >= count) return;
    const float4 u = load_constant(reinterpret_cast<const float4*>(a + i));
    const float4 v = load_constant(reinterpret_cast<const float4*>(b + i));
    store(reinterpret_cast<float4*>(y + i), float4{u.x + v.x, u.y + v.y, u.z + v.z, u.w + v.w});
}

KERNEL(THREADS, 8)
narrow(const float* x, half* y, int count) {
    const int i = (blockIdx.x * THREADS + threadIdx.x) * PACK;
    if (i >= count) return;
    const float4 v = load_constant(reinterpret_cast<const float4*>(x + i));
    store(reinterpret_cast<uint2*>(y + i),
          uint2{pack2(to_f16(v.x), to_f16(v.y)), pack2(to_f16(v.z), to_f16(v.w))});
}

KERNEL(THREADS, 8)
widen(const half* x, float* y, int count) {
    const int i = (blockIdx.x * THREADS + threadIdx.x) * PACK;
    if (i >= count) return;
    const uint2 v = load_constant(reinterpret_cast<const uint2*>(x + i));
    store(reinterpret_cast<float4*>(y + i), float4{to_f32(low_of(v.x)), to_f32(high_of(v.x)),
                                                   to_f32(low_of(v.y)), to_f32(high_of(v.y))});
}
