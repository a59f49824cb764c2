// common: the primitives every kernel family shares.  No kernel lives here, nothing has a shape.
//
// A kernel is compiled twice: by NVRTC for the device, and by g++ for the tests, where each CUDA
// thread is a fibre (host/simt.hpp).  So a kernel touches global and shared memory only through
// the accessors below, and meets other threads only through the collectives below.  On the device
// they are the plain instruction; on the host they also check bounds, alignment, memory that
// nothing wrote, and races, and name the kernel's line.  SITE carries that line and is empty on
// the device; a function that calls an accessor on behalf of its caller takes SITE and passes AT.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr int WARP = 32;
constexpr u32 FULL_WARP = 0xffffffffu;

#ifdef __CUDACC__
#include <cuda_fp16.h>

#define DEVICE __device__ __forceinline__
// At most `threads` per block, and registers few enough for `blocks` blocks on one multiprocessor.
#define KERNEL(threads, blocks) __global__ void __launch_bounds__(threads, blocks)
#define SITE
#define SITE_ONLY
#define AT
#define AT_ONLY
// A block's array in shared memory, `count` elements known when compiling, 16-byte aligned.
#define SHARED(type, name, count) __shared__ __align__(16) type name[count]
// The shared memory whose size the launch states.
#define SHARED_DYNAMIC(type, name)                         \
    extern __shared__ __align__(16) u8 dynamic_shared[]; \
    type* name = reinterpret_cast<type*>(dynamic_shared)

// --- memory --------------------------------------------------------------------------------------

template <class T>
DEVICE T load(const T* p) { return *p; }
// Memory that no thread writes while the kernel runs: cached in L1.
template <class T>
DEVICE T load_constant(const T* p) { return __ldg(p); }
// 16 bytes that the kernel reads once (weights): they pass L1 by, which keeps what is read often.
DEVICE uint4 load_once(const uint4* p) {
    uint4 v;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(p));
    return v;
}
template <class T>
DEVICE void store(T* p, T value) { *p = value; }
template <class T>
DEVICE T load_shared(const T* p) { return *p; }
template <class T>
DEVICE void store_shared(T* p, T value) { *p = value; }

// --- collectives: every thread of the warp or of the block calls them together -------------------

DEVICE void sync_block() { __syncthreads(); }
// Orders the shared memory accesses of a warp's lanes.  Shuffles and mma do not.
DEVICE void sync_warp() { __syncwarp(FULL_WARP); }
template <class T>
DEVICE T shuffle(T value, int lane) { return __shfl_sync(FULL_WARP, value, lane); }
template <class T>
DEVICE T shuffle_xor(T value, int mask) { return __shfl_xor_sync(FULL_WARP, value, mask); }
template <class T>
DEVICE T shuffle_up(T value, int delta) { return __shfl_up_sync(FULL_WARP, value, delta); }
template <class T>
DEVICE T shuffle_down(T value, int delta) { return __shfl_down_sync(FULL_WARP, value, delta); }
DEVICE u32 ballot(bool fact) { return __ballot_sync(FULL_WARP, fact); }

// Tensor cores.  A warp computes four independent products of 8x4 by 4x8, one per quad-pair:
// quad-pair q = (lane >> 2) & 3 is lanes 4q..4q+3 and 16+4q..16+4q+3.  Within it a lane is
// r = (lane & 3) + (lane >= 16 ? 4 : 0), and holds
//   A (8x4)            a_i = A[row r][k i],  i = 0..3, two halves per register
//   B (4x8)            b_i = B[k i][column r]
//   B of mma_row_row   b_i = B[k lane & 3][column i + (lane >= 16 ? 4 : 0)]
//   C, D (8x8, f32)    c_i = C[row (lane & 1) + (i & 2) + (lane >= 16 ? 4 : 0)]
//                             [column (i & 4) + (lane & 2) + (i & 1)],  i = 0..7
// c += A B.
DEVICE void mma_row_col(float (&c)[8], u32 a0, u32 a1, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9}, {%10, %11}, "
        "{%0, %1, %2, %3, %4, %5, %6, %7};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]),
          "+f"(c[7])
        : "r"(a0), "r"(a1), "r"(b0), "r"(b1));
}
DEVICE void mma_row_row(float (&c)[8], u32 a0, u32 a1, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m8n8k4.row.row.f32.f16.f16.f32 "
        "{%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9}, {%10, %11}, "
        "{%0, %1, %2, %3, %4, %5, %6, %7};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]),
          "+f"(c[7])
        : "r"(a0), "r"(a1), "r"(b0), "r"(b1));
}

// --- numbers -------------------------------------------------------------------------------------

DEVICE float to_f32(half h) { return __half2float(h); }
DEVICE half to_f16(float f) { return __float2half_rn(f); }
DEVICE u32 bits_of(half2 h) { return *reinterpret_cast<const u32*>(&h); }
DEVICE half2 half2_of(u32 bits) { return *reinterpret_cast<const half2*>(&bits); }
DEVICE half half_of(u16 bits) { return __ushort_as_half(bits); }
DEVICE u16 bits_of(half h) { return __half_as_ushort(h); }
DEVICE half2 both(half h) { return __half2half2(h); }
DEVICE half2 add2(half2 a, half2 b) { return __hadd2_rn(a, b); }
DEVICE half2 sub2(half2 a, half2 b) { return __hsub2_rn(a, b); }
DEVICE half2 mul2(half2 a, half2 b) { return __hmul2_rn(a, b); }
DEVICE half2 fma2(half2 a, half2 b, half2 c) { return __hfma2(a, b, c); }
DEVICE half mul(half a, half b) { return __hmul_rn(a, b); }
DEVICE float exp_f32(float x) { return __expf(x); }
DEVICE float rsqrt_f32(float x) { return rsqrtf(x); }
// (a & mask) | b, in one LOP3.
DEVICE u32 and_or(u32 a, u32 mask, u32 b) {
    u32 result;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(a), "r"(mask), "r"(b));
    return result;
}
DEVICE u32 f32_bits(float f) { return __float_as_uint(f); }
DEVICE float f32_of(u32 bits) { return __uint_as_float(bits); }

#else
#include "host/simt.hpp"
#endif

// --- what both have ------------------------------------------------------------------------------

DEVICE u32 pack2(half low, half high) { return bits_of(low) | u32(bits_of(high)) << 16; }
DEVICE half low_of(u32 pair) { return half_of(u16(pair)); }
DEVICE half high_of(u32 pair) { return half_of(u16(pair >> 16)); }

// Sums in a fixed order: lane distances 16, 8, 4, 2, 1.
DEVICE float warp_sum(float value SITE) {
    for (int distance = WARP / 2; distance > 0; distance /= 2) {
        value += shuffle_xor(value, distance AT);
    }
    return value;
}
DEVICE float warp_max(float value SITE) {
    for (int distance = WARP / 2; distance > 0; distance /= 2) {
        value = fmaxf(value, shuffle_xor(value, distance AT));
    }
    return value;
}

// The sum over a block of WARPS whole warps, in a fixed order, known to every thread.
template <int WARPS>
DEVICE float block_sum(float value SITE) {
    SHARED(float, partial, WARPS);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    value = warp_sum(value AT);
    sync_block(AT_ONLY);  // an earlier call may still read `partial`
    if (lane == 0) store_shared(partial + warp, value AT);
    sync_block(AT_ONLY);  // all warps' sums are there
    return warp_sum(lane < WARPS ? load_shared(partial + lane AT) : 0.0f AT);
}
