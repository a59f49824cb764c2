// skinny: a few rows of activations times a quantised matrix.
// Wrapper: phaseloop/kernels/skinny.py.
//
//   y[m,n] = sum_k x[m,k] * w[n,k] + bias[n] + residual[m,n]
//
// Shapes     x: f16 [M, K], 16-byte aligned; w: planes of [N, K] (phaseloop/kernels/repack.py);
//            bias: f32 [N] or null; residual: f32 [M, N] or null, may be y; y: f32 [M, N].
//            K % 32 == 0.  M <= 8 * TILES, any N.
// Numerics   w as halves (quant.cuh), products and sums in f32.  Oracle: GGML's dequantised weights
//            in f64; relative L2 <= 1e-3, of which the halves are 3e-4.  A row's bits depend on its
//            activations, on w and on nothing else: neither on M nor on its place among the rows,
//            in both kernels here alike.
// Mapping    Eight warps share 32 columns n (a row group of w).  Warp i takes units i, i + 8, ...
//            of K: a lane owns column n = lane of the group and expands its weights into registers,
//            where they are the B operand; a quad-pair multiplies its 8 columns by 8 rows of x,
//            whose A operand is the same for all four quad-pairs.  So nothing is shuffled.  The
//            next unit's loads are under way while one is multiplied.  At the end the warps' sums
//            are added in the order of the warps, through shared memory.
//   skinny          M <= 8 (TILES 1) or 16 (TILES 2): A comes straight from global memory, in L1.
//   skinny_staged   M <= 32 (TILES 4) or 48 (TILES 6): 16 warps share 64 columns, and A goes
//                   through shared memory a strip at a time, each byte read by two warps.
// Roofline   bound by the weights: Q4_K 0.5625 B per weight at 900 GB/s is 1.6 * 10^12 weights/s,
//            while 8 rows cost 16 flop per weight, 26 TFLOP/s of the 90 that HMMA sustains.
//            N = K = 4096: 9.4 MB, 10.5 us.  Of 32 weights, 13 integer and half operations expand
//            8 (Q4_K), 8 HMMA multiply; a scheduler needs 170 cycles for them, memory 280.
// Measured   not yet, for want of a device.
#include "quant.cuh"

constexpr int K_WARPS = 8;               // warps that share a group's K
constexpr int STRIP = 32, OCTET = 8;     // columns of x
constexpr int ROWS = 8;                  // of one tile of x
constexpr int PITCH = WARP + 16;         // floats between rows of partial sums: a half-warp stores
                                         // two rows of 16, which then fill the 32 banks

// The row of A, or column of B, that a lane holds of its quad-pair's.
DEVICE int fragment_row(int lane) { return (lane & 3) + (lane >= 16 ? 4 : 0); }

// One tile's sums of one warp, to [ROWS][pitch] floats.  Column r of a quad-pair's product is the
// group's column that the lane with fragment_row r owns: 4 q + (r & 3), and 16 over for r >= 4.
DEVICE void store_partial(float* partial, const float (&c)[8], int lane, int pitch SITE) {
    const int row = (lane & 1) + (lane >= 16 ? 4 : 0), column = (lane & 12) + (lane & 2);
    for (int i = 0; i < 8; i += 2) {
        float* to = partial + (row + (i & 2)) * pitch + column + (i & 4) * 4;
        store_shared(reinterpret_cast<float2*>(to), float2{c[i], c[i + 1]} AT);
    }
}

// The warps' sums of one element, in the order of the warps, and its y.
DEVICE void finish(const float* partial, int stride, const float* bias, const float* residual,
                   float* y, int m, int n, int N SITE) {
    float sum = load_shared(partial AT);
    for (int warp = 1; warp < K_WARPS; ++warp) sum += load_shared(partial + warp * stride AT);
    if (bias) sum += load_constant(bias + n AT);
    const size_t element = size_t(m) * N + n;
    if (residual) sum += load(residual + element AT);
    store(y + element, sum AT);
}

// Blocks that a multiprocessor should hold: 64 and 80 registers, and more for Q3_K's many parts.
template <class Type, int TILES>
constexpr int RESIDENT = 5 - TILES - IS_SAME<Type, Q3_K>;

template <class Type, int TILES>
KERNEL(K_WARPS * WARP, (RESIDENT<Type, TILES>))
skinny(const half* x, const uint4* weight, const float* bias, const float* residual, float* y,
       int M, int N, int K) {
    SHARED(float, partial, K_WARPS * TILES * ROWS * PITCH);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int units = K / Type::UNIT;
    const Planes<Type> planes(weight, blockIdx.x, gridDim.x, K / Type::BLOCK, lane);
    int rows[TILES];  // where the lane's rows of x begin; those beyond M repeat the last
    for (int tile = 0; tile < TILES; ++tile) {
        rows[tile] = min(tile * ROWS + fragment_row(lane), M - 1) * K;
    }

    float c[TILES][8] = {};
    typename Type::Raw next{};
    if (warp < units) next = Type::fetch(planes, warp);
    for (int unit = warp; unit < units; unit += K_WARPS) {
        const typename Type::Raw raw = next;
        if (unit + K_WARPS < units) next = Type::fetch(planes, unit + K_WARPS);
#pragma unroll
        for (int strip = 0; strip < Type::UNIT / STRIP; ++strip) {
            half2 scale;
#pragma unroll
            for (int octet = 0; octet < STRIP / OCTET; ++octet) {
                const int k = unit * Type::UNIT + strip * STRIP + octet * OCTET;
                if (octet % Type::STEP_OCTETS == 0) scale = scale_of<Type>(raw, unit, strip, octet);
                u32 b[4];
                expand<Type>(raw, strip, octet, scale, b);
                if constexpr (TILES > 1) sync_warp();  // what is loaded ahead fits the registers
                for (int tile = 0; tile < TILES; ++tile) {
                    const half* from = x + (rows[tile] + k);
                    const uint4 a = load_constant(reinterpret_cast<const uint4*>(from));
                    mma_row_col(c[tile], a.x, a.y, b[0], b[1]);
                    mma_row_col(c[tile], a.z, a.w, b[2], b[3]);
                }
            }
        }
    }

    for (int tile = 0; tile < TILES; ++tile) {
        store_partial(partial + (warp * TILES + tile) * ROWS * PITCH, c[tile], lane, PITCH);
    }
    sync_block();  // all warps' sums are there
    const int n = blockIdx.x * WARP + lane;
    for (int m = warp; m < TILES * ROWS; m += K_WARPS) {
        if (m < M && n < N) {
            finish(partial + m * PITCH + lane, TILES * ROWS * PITCH, bias, residual, y, m, n, N);
        }
    }
}

// --- activations through shared memory -----------------------------------------------------------

constexpr int N_WARPS = 2;  // row groups of w that share what is staged of x
constexpr int STAGED_THREADS = K_WARPS * N_WARPS * WARP;
constexpr int STAGED_PITCH = N_WARPS * WARP + 16;
constexpr int STRIP_OCTETS = STRIP / OCTET;  // 16-byte pieces of a row's strip

// Where octet o of row m of a staged strip lies.  Rows are 64 bytes apart, two rows fill the banks;
// the exclusive or keeps the four rows that a quarter-warp reads in different ones.
DEVICE int staged_at(int m, int o) { return m * STRIP_OCTETS + (o ^ (m >> 1 & 3)); }

// One strip of all rows, from column k on, to staged [TILES * ROWS][4] pieces, by the two warps
// that will read it; `thread` counts their threads.  Beyond K: zeros.
template <int TILES>
DEVICE void stage(uint4* staged, const half* x, int k, int thread, int M, int K SITE) {
    constexpr int STEP = N_WARPS * WARP / STRIP_OCTETS;  // rows at a time
    const int o = thread % STRIP_OCTETS;
    k += o * OCTET;
#pragma unroll
    for (int m = thread / STRIP_OCTETS; m < TILES * ROWS; m += STEP) {
        const uint4* from = reinterpret_cast<const uint4*>(x + (min(m, M - 1) * K + k));
        const uint4 piece = k < K ? load_constant(from AT) : uint4{0, 0, 0, 0};
        store_shared(staged + staged_at(m, o), piece AT);
    }
}

template <class Type, int TILES>
KERNEL(STAGED_THREADS, 1)
skinny_staged(const half* x, const uint4* weight, const float* bias, const float* residual,
              float* y, int M, int N, int K) {
    constexpr int STRIPS = Type::UNIT / STRIP, PIECES = TILES * ROWS * STRIP_OCTETS;
    // Two buffers of staged x; afterwards one tile's partial sums.
    constexpr int STAGED = K_WARPS * PIECES;
    SHARED(uint4, shared, 2 * STAGED);
    static_assert(K_WARPS * ROWS * STAGED_PITCH <= 2 * STAGED * 4, "the sums fit the same memory");
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % K_WARPS;
    const int side = threadIdx.x / (WARP * K_WARPS), groups = (N + WARP - 1) / WARP;
    const int units = K / Type::UNIT, turns = (units + K_WARPS - 1) / K_WARPS;
    // An odd last group is computed twice, and stored once.
    const int group = min(int(blockIdx.x) * N_WARPS + side, groups - 1);
    const Planes<Type> planes(weight, group, groups, K / Type::BLOCK, lane);

    float c[TILES][8] = {};
    uint4* mine = shared + warp * PIECES;
    const int thread = side * WARP + lane;
    stage<TILES>(mine, x, warp * Type::UNIT, thread, M, K);
    for (int turn = 0; turn < turns; ++turn) {
        const int unit = turn * K_WARPS + warp;
#pragma unroll 1  // two strips' parts at a time would not fit the registers
        for (int strip = 0; strip < STRIPS; ++strip) {
            const int number = turn * STRIPS + strip;
            // The strip's part of the unit, for the rest is not used; under way at the barrier.
            const typename Type::Raw raw = Type::fetch(planes, min(unit, units - 1));
            sync_block();  // this strip is staged, and nobody reads the other buffer any more
            if (number + 1 < turns * STRIPS) {
                const int k = strip + 1 < STRIPS ? unit * Type::UNIT + (strip + 1) * STRIP
                                                 : (unit + K_WARPS) * Type::UNIT;
                stage<TILES>(mine + (number + 1) % 2 * STAGED, x, k, thread, M, K);
            }
            if (unit >= units) continue;
            const uint4* staged = mine + number % 2 * STAGED;
            half2 scale;
#pragma unroll
            for (int octet = 0; octet < STRIP_OCTETS; ++octet) {
                if (octet % Type::STEP_OCTETS == 0) scale = scale_of<Type>(raw, unit, strip, octet);
                u32 b[4];
                expand<Type>(raw, strip, octet, scale, b);
                sync_warp();  // what the compiler loads ahead fits the registers
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile) {
                    const int m = tile * ROWS + fragment_row(lane);
                    const uint4 a = load_shared(staged + staged_at(m, octet));
                    mma_row_col(c[tile], a.x, a.y, b[0], b[1]);
                    mma_row_col(c[tile], a.z, a.w, b[2], b[3]);
                }
            }
        }
    }

    float* partial = reinterpret_cast<float*>(shared);
    constexpr int STRIDE = ROWS * STAGED_PITCH;
    const int column = threadIdx.x % (N_WARPS * WARP), n = blockIdx.x * N_WARPS * WARP + column;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        sync_block();  // nobody reads staged x, or the tile before, any more
        store_partial(partial + warp * STRIDE + side * WARP, c[tile], lane, STAGED_PITCH);
        sync_block();  // all warps' sums are there
        const int row = threadIdx.x / (N_WARPS * WARP), m = tile * ROWS + row;
        if (m < M && n < N) {
            finish(partial + row * STAGED_PITCH + column, STRIDE, bias, residual, y, m, n, N);
        }
    }
}
