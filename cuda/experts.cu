// experts: rows times the matrices of the experts that serve them.
// Wrapper: phaseloop/kernels/experts.py.
//
//   y[i,n] = sum_k x[row(i),k] * w[expert(i),n,k],   i counting assignments in moe.cu's order
//
// Shapes     x: f16 [R, K]; row(i) = order[i] / U, the row that was assigned, or i where order is
//            null; w: planes of [E N, K] (phaseloop/kernels/repack.py), one expert after the other,
//            32 | N; tiles: i32 [tiles, 4] of moe.cu, each at most 8 * TILES assignments of one
//            expert; y: f32 [T U, N].  K % 32 == 0.
// Numerics   as skinny.cu, and in the same order: eight parts of K, added in the order of the
//            parts. A row's bits depend on its activations and its expert's matrix alone.
// Mapping    a block per 32 columns n and tile; eight warps share K, a lane owns a column and a
//            quad-pair multiplies its 8 columns by 8 rows, as in skinny.cu.  x is gathered as it is
//            read; tiles beyond the last end at once.
// Roofline   bound by the weights of the experts that are used: Qwen3-30B-A3B in Q4_K, one token: 8
//            experts of 3 * 768 * 2048 weights, 21 MB per layer, 24 us.  Tiles of one expert read
//            its matrix once each, all but the first from L2.
// Measured   not yet, for want of a device.
#include "quant.cuh"

constexpr int K_WARPS = 8, STRIP = 32, OCTET = 8, ROWS = 8;
constexpr int PITCH = WARP + 16;  // floats between rows of partial sums: no bank conflicts

// The row of A, or column of B, that a lane holds of its quad-pair's.
DEVICE int fragment_row(int lane) { return (lane & 3) + (lane >= 16 ? 4 : 0); }

// A tile's sums of one warp, as [ROWS][PITCH] floats: column r of quad-pair q is the column that
// the lane with fragment_row r of q owns.
DEVICE void store_partial(float* partial, const float (&c)[8], int lane SITE) {
    const int row = (lane & 1) + (lane >= 16 ? 4 : 0), column = (lane & 12) + (lane & 2);
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
        float* to = partial + (row + (i & 2)) * PITCH + column + (i & 4) * 4;
        store_shared(reinterpret_cast<float2*>(to), float2{c[i], c[i + 1]} AT);
    }
}

template <class Type, int TILES>
KERNEL(K_WARPS * WARP, TILES == 1 ? 3 : 2)
experts(const half* x, const uint4* weight, const int* order, const int4* tiles, float* y, int U,
        int E, int N, int K) {
    SHARED(float, partial, K_WARPS * TILES * ROWS * PITCH);
    const int4 tile_of = load_constant(tiles + blockIdx.y);  // expert, first, count
    if (tile_of.x < 0) return;                               // the whole block
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, groups = N / WARP;
    const int units = (K + Type::UNIT - 1) / Type::UNIT;
    const Planes<Type> planes(weight, tile_of.x * groups + blockIdx.x, E * groups, K / Type::BLOCK,
                              lane);
    const half* rows[TILES];  // those beyond the last repeat it
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        const int i = tile_of.y + min(tile * ROWS + fragment_row(lane), tile_of.z - 1);
        rows[tile] = x + size_t(order ? load_constant(order + i) / U : i) * K;
    }

    float c[TILES][8] = {};
    for (int unit = warp; unit < units; unit += K_WARPS) {
        const typename Type::Raw raw = Type::fetch(planes, unit);
#pragma unroll
        for (int strip = 0; strip < Type::UNIT / STRIP; ++strip) {
            if (unit * Type::UNIT + strip * STRIP >= K) break;  // half a unit at K's end
            half2 scale;
#pragma unroll
            for (int octet = 0; octet < STRIP / OCTET; ++octet) {
                const int k = unit * Type::UNIT + strip * STRIP + octet * OCTET;
                if (octet % Type::STEP_OCTETS == 0) scale = scale_of<Type>(raw, unit, strip, octet);
                u32 b[4];
                expand<Type>(raw, strip, octet, scale, b);
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile) {
                    const uint4 a = load_constant(reinterpret_cast<const uint4*>(rows[tile] + k));
                    mma_row_col(c[tile], a.x, a.y, b[0], b[1]);
                    mma_row_col(c[tile], a.z, a.w, b[2], b[3]);
                }
            }
        }
    }

#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        store_partial(partial + (warp * TILES + tile) * ROWS * PITCH, c[tile], lane);
    }
    sync_block();  // all warps' sums are there
    for (int m = warp; m < TILES * ROWS && m < tile_of.z; m += K_WARPS) {
        float sum = load_shared(partial + m * PITCH + lane);
        for (int part = 1; part < K_WARPS; ++part) {
            sum += load_shared(partial + (part * TILES * ROWS + m) * PITCH + lane);
        }
        store(y + size_t(tile_of.y + m) * N + blockIdx.x * WARP + lane, sum);
    }
}
