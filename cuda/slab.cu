// slab: part of a quantised matrix as halves, row by row: what a library's GEMM multiplies.
// Wrapper: phaseloop/kernels/slab.py.
//
//   s[i,k] = w[first + i,k],   first = 32 * first_group
//
// Shapes     w: planes of [N, K] (phaseloop/kernels/repack.py), K % 32 == 0; s: f16 [R, K], 16-byte
//            aligned, of which whole groups of 32 rows are written, but for rows beyond N.
// Numerics   w as halves (quant.cuh): the bits that prefill.cu multiplies.
// Mapping    a warp expands 32 rows by a strip of 32 columns: a lane its row, as it lies in the
//            planes.  Through 2 KB of shared memory the strip is turned, so that four lanes store
//            64 adjacent bytes of a row: whole sectors.
// Roofline   Q4_K: 0.56 B read and 2 B written per weight; a slab of 4 MiB stays in L2, where its
//            2 million weights take 1.3 MB from memory, 1.3 us, and some 4 us to store.
// Measured   not yet, for want of a device.
#include "quant.cuh"

constexpr int WARPS = 4, THREADS = WARPS * WARP;
constexpr int STRIP = 32, OCTET = 8, STRIP_OCTETS = STRIP / OCTET;

// Where octet o of a staged row lies: rows are 64 bytes, two fill the banks; the exclusive or
// spreads the eight rows that a quarter-warp writes over all of them.
DEVICE int staged_at(int row, int o) { return row * STRIP_OCTETS + (o ^ (row >> 1 & 3)); }

template <class Type>
KERNEL(THREADS, 8)
slab(const uint4* weight, half* s, int first_group, int N, int K) {
    SHARED(uint4, staged, WARPS * WARP * STRIP_OCTETS);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int number = blockIdx.y * WARPS + warp, groups = (N + WARP - 1) / WARP;
    if (number * STRIP >= K) return;  // a whole warp
    constexpr int STRIPS = Type::UNIT / STRIP;
    const int unit = number / STRIPS, strip = number % STRIPS, group = first_group + blockIdx.x;
    const Planes<Type> planes(weight, group, groups, K / Type::BLOCK, lane);
    const typename Type::Raw raw = Type::fetch(planes, unit);
    uint4* mine = staged + warp * WARP * STRIP_OCTETS;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
        const HalfStrip<Type> half(raw, unit, strip, part);
        store_shared(mine + staged_at(lane, 2 * part), half.expanded(0));
        store_shared(mine + staged_at(lane, 2 * part + 1), half.expanded(1));
    }
    sync_warp();  // the strip is staged
    const int octet = lane % STRIP_OCTETS;
#pragma unroll
    for (int first = 0; first < WARP; first += WARP / STRIP_OCTETS) {
        const int row = first + lane / STRIP_OCTETS;
        if (group * WARP + row >= N) continue;
        half* to = s + (size_t(blockIdx.x * WARP + row) * K + number * STRIP + octet * OCTET);
        store(reinterpret_cast<uint4*>(to), load_shared(mine + staged_at(row, octet)));
    }
}
