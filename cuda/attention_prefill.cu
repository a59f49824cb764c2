// attention_prefill: attention of a prompt's chunk over itself and all that is cached before it.
// Wrapper: phaseloop/kernels/attention_prefill.py.
//
//   s[t,h,p]  = cap * tanh(scale * q[t,h,:] . k[p,h / G,:] / cap), without tanh where cap is 0,
//               for p <= position of t, and position - p < window
//   y[t,h,:]  = sum_p softmax_p(s)[p] * v[p,h / G,:]
//
// Shapes     q, y: f16 [T, H, D]; lane l's rows are firsts[l] .. firsts[l] + counts[l] - 1, at
//            positions from starts[l] on, and their keys are cached; table: i32 [L, pages]; the
//            cache: kv.cuh, KvF16 (Q8_0 is unpacked first, once per chunk: cells.cu).
//            G = H / HKV.  D is 64, 96, 128, 192 or 256.
// Numerics   products of halves, sums in f32, e^(s - m) rounded to f16.  Against f64: relative L2
//            <= 1e-3.  A tile of keys begins at a multiple of KEYS whatever the chunk; every tile
//            rescales (by 1 where the maximum stays), and keys that a row does not see add exact
//            zeros: so a row's bits depend neither on the chunk nor on its place in it.
// Mapping    a block per 64 rows (a row is a token and a query head of the KV head's group: GQA
//            shares every key that is staged), KV head and lane; later rows first, as they take
//            longest.  Eight warps: 2 halves of the rows times 4 quarters of a tile's KEYS, then of
//            D.  A quad-pair multiplies 8 of a warp's 32 rows; all four share the B operand.  Keys
//            and values pass through one buffer, the next tile's in registers meanwhile; weights go
//            through shared memory.  Pieces lie as kv.cuh has them: every operand is a piece.
// Roofline   4 D flop per row and key seen; a key is read once per 64 rows: D = 128, G = 4: 512
//            flop per row for 8 B, so tensor cores bound it.  For D = 128 they get 3 loads of 16 B
//            from shared memory per 4 mma of keys, 5 per 8 of values: its bandwidth is the tighter
//            bound, at some 75 % of what HMMA sustains.
//            H = 32, D = 128, a chunk of 2048 at position 0: 34 GFLOP per layer, 0.7 ms at 50 TF.
// Measured   not yet, for want of a device.
#include "attention.cuh"

constexpr int WARPS = 8, THREADS = WARPS * WARP, ROWS = 64;
constexpr int SIDES = ROWS / WARP, QUARTERS = WARPS / SIDES;

template <int D>
struct Tile {
    static constexpr int KEYS = D <= 128 ? 64 : 32;
    static constexpr int OCTETS = D / OCTET, KEY_OCTETS = KEYS / OCTET;
    static constexpr int SCORES = KEYS / QUARTERS / 8;  // accumulators of a warp: 32 rows by 8 keys
    static constexpr int SUMS = D / QUARTERS / 8;       // and 32 rows by 8 dimensions
    static constexpr int EACH = OCTETS * KEYS / THREADS;  // pieces of a tile that a thread stages
    static_assert(EACH * THREADS == OCTETS * KEYS && SCORES > 0, "tiles divide evenly");
};

// Of accumulator i: the row among a warp's 32 (its quad-pairs have rows by the lanes that load
// them: row = lane), and the column among 8.
DEVICE int row_of(int lane, int i) { return (lane & 29) + (i & 2); }
DEVICE int column_of(int lane, int i) { return (i & 4) + (lane & 2) + (i & 1); }

struct Block {
    Scoring scoring;
    int lane, head, G, H;
    int first, start, count;  // of the lane: its first row of q, its position, its rows
    int row_first;            // of the lane's count * G rows

    DEVICE int clamped(int row) const { return min(row_first + row, count * G - 1); }
    DEVICE bool has(int row) const { return row_first + row < count * G; }
    DEVICE int position(int row) const { return start + clamped(row) / G; }
    DEVICE size_t at(int row) const {  // among [T, H]; rows beyond the last repeat it
        const int r = clamped(row);
        return size_t(first + r / G) * H + head * G + r % G;
    }
};

template <int D>
struct Staged {  // a thread's pieces of a tile
    uint4 pieces[Tile<D>::EACH];
};

// A tile of keys, as [D / 8][KEYS] pieces, or of values, as [KEYS / 8][D].
template <int D, bool IS_VALUES>
DEVICE Staged<D> fetch(const uint4* plane, int token, int live SITE) {
    constexpr int KEYS = Tile<D>::KEYS;
    Staged<D> staged;
#pragma unroll
    for (int n = 0; n < Tile<D>::EACH; ++n) {
        const int i = n * THREADS + threadIdx.x;
        if (IS_VALUES) {
            const uint4 piece = load_constant(plane + token / OCTET * D + i AT);
            staged.pieces[n] = first_halves(piece, live - i / D * OCTET);
        } else {
            staged.pieces[n] = load_constant(plane + i / KEYS * PAGE + token + i % KEYS AT);
        }
    }
    return staged;
}

template <int D>
DEVICE void put(uint4* buffer, const Staged<D>& staged SITE) {
#pragma unroll
    for (int n = 0; n < Tile<D>::EACH; ++n) {
        store_shared(buffer + n * THREADS + threadIdx.x, staged.pieces[n] AT);
    }
}

// c[n] += a warp's 32 rows of `left` times 8 of the columns of `right`, which are pieces
// [OCTETS][ROWS] and [OCTETS][COLUMNS]; row and column are the warp's first.
template <int N, int OCTETS, int COLUMNS>
DEVICE void multiply(float (&c)[N][8], const uint4* left, const uint4* right, int row,
                     int column SITE) {
    const int lane = threadIdx.x % WARP;
#pragma unroll 2
    for (int octet = 0; octet < OCTETS; ++octet) {
        const uint4 a = load_shared(left + octet * ROWS + row + lane AT);
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const uint4* at = right + octet * COLUMNS + column + n * 8 + fragment_row(lane);
            const uint4 b = load_shared(at AT);
            mma_row_col(c[n], a.x, a.y, b.x, b.y AT);
            mma_row_col(c[n], a.z, a.w, b.z, b.w AT);
        }
    }
}

// What a lane keeps of the two rows that its accumulators have, i & 2 = 0 and 2.
struct Running {
    float maximum[2], sum[2];  // the sum is of this lane's keys alone
};

// From products to scores, never() where a row does not see a key; each quarter's maxima to shared.
template <int D>
DEVICE void score(float (&s)[Tile<D>::SCORES][8], const Block& block, float* maxima, int base,
                  int side, int quarter SITE) {
    const int lane = threadIdx.x % WARP;
    float greatest[2] = {never(), never()};
#pragma unroll
    for (int n = 0; n < Tile<D>::SCORES * 8; ++n) {
        const int i = n % 8, row = side * WARP + row_of(lane, i);
        const int key = (quarter * Tile<D>::SCORES + n / 8) * 8 + column_of(lane, i);
        float& each = s[n / 8][i];
        const bool is_seen = block.scoring.sees(block.position(row), base + key);
        each = is_seen ? block.scoring.of(each) : never();
        greatest[i / 2 % 2] = fmaxf(greatest[i / 2 % 2], each);
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        const float value = fmaxf(greatest[row], shuffle_xor(greatest[row], 2 AT));
        float* to = maxima + quarter * ROWS + side * WARP + row_of(lane, 2 * row);
        if ((lane & 2) == 0) store_shared(to, value AT);
    }
}

// The weights of a warp's scores, to shared memory as [octet of keys][row]; factor is what the sums
// so far are to be multiplied by.
template <int D>
DEVICE void weigh(const float (&s)[Tile<D>::SCORES][8], uint4* weights, const float* maxima,
                  Running& running, float (&factor)[2], int side, int quarter SITE) {
    const int lane = threadIdx.x % WARP;
    float top[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        float maximum = running.maximum[row];
        for (int each = 0; each < QUARTERS; ++each) {
            const float* at = maxima + each * ROWS + side * WARP + row_of(lane, 2 * row);
            maximum = fmaxf(maximum, load_shared(at AT));
        }
        top[row] = finite_maximum(maximum);
        factor[row] = exp_f32(running.maximum[row] - top[row]);
        running.maximum[row] = maximum;
        running.sum[row] *= factor[row];
    }
#pragma unroll
    for (int n = 0; n < Tile<D>::SCORES * 4; ++n) {
        const int i = 2 * (n % 4), row = i / 2 % 2, octet = quarter * Tile<D>::SCORES + n / 4;
        const half low = to_f16(exp_f32(s[n / 4][i] - top[row]));
        const half high = to_f16(exp_f32(s[n / 4][i + 1] - top[row]));
        uint4* piece = weights + octet * ROWS + side * WARP + row_of(lane, i);
        store_shared(reinterpret_cast<u32*>(piece) + column_of(lane, i) / 2, pack2(low, high) AT);
        running.sum[row] += to_f32(low) + to_f32(high);
    }
}

// The sums of a warp's rows over all keys: of two lanes, then of the quarters in their order.
DEVICE void total(float (&sum)[2], float* shared, int side, int quarter SITE) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        const float value = sum[row] + shuffle_xor(sum[row], 2 AT);
        float* to = shared + quarter * ROWS + side * WARP + row_of(lane, 2 * row);
        if ((lane & 2) == 0) store_shared(to, value AT);
    }
    sync_block(AT_ONLY);  // all quarters' sums are there
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        const float* from = shared + side * WARP + row_of(lane, 2 * row);
        sum[row] = load_shared(from AT);
        for (int each = 1; each < QUARTERS; ++each) sum[row] += load_shared(from + each * ROWS AT);
    }
}

template <int D>
DEVICE void stage_queries(uint4* queries, const half* q, const Block& block SITE) {
    for (int i = threadIdx.x; i < ROWS * Tile<D>::OCTETS; i += THREADS) {
        const int row = i / Tile<D>::OCTETS, octet = i % Tile<D>::OCTETS;
        const uint4* from = reinterpret_cast<const uint4*>(q + block.at(row) * D) + octet;
        store_shared(queries + octet * ROWS + row, load_constant(from AT) AT);
    }
}

template <int D>
KERNEL(THREADS, D <= 128 ? 2 : 1)
attend_chunk(const half* q, const void* keys, const void* values, const int* firsts,
             const int* starts, const int* counts, const int* table, half* y, float scale,
             float cap, int window, int H, int HKV, int pages) {
    constexpr int KEYS = Tile<D>::KEYS, SUMS = Tile<D>::SUMS;
    SHARED_DYNAMIC(uint4, queries);                         // [D / 8][ROWS]
    uint4* buffer = queries + Tile<D>::OCTETS * ROWS;       // keys, then values of a tile
    uint4* weights = buffer + Tile<D>::OCTETS * KEYS;       // [KEYS / 8][ROWS]
    SHARED(float, maxima, QUARTERS * ROWS);

    Block block;
    block.scoring = {scale, cap, window};
    block.lane = blockIdx.z, block.head = blockIdx.y, block.H = H, block.G = H / HKV;
    block.first = load_constant(firsts + block.lane);
    block.start = load_constant(starts + block.lane);
    block.count = load_constant(counts + block.lane);
    block.row_first = int(gridDim.x - 1 - blockIdx.x) * ROWS;
    if (!block.has(0)) return;  // the whole block
    const int tile_first = block.scoring.first(block.position(0)) / KEYS;
    const int tile_last = block.position(ROWS - 1) / KEYS, written = block.start + block.count;
    const auto plane = [&](const void* elements, int tile) {
        const int* page = table + size_t(block.lane) * pages + tile * KEYS / PAGE;
        const size_t before = plane_at(load_constant(page), block.head, HKV, D);
        return static_cast<const uint4*>(elements) + before / OCTET;
    };
    const int warp = threadIdx.x / WARP, side = warp / QUARTERS, quarter = warp % QUARTERS;
    const int lane = threadIdx.x % WARP;

    stage_queries<D>(queries, q, block);
    Running running = {{never(), never()}, {0.0f, 0.0f}};
    float c[SUMS][8] = {};
    Staged<D> next = fetch<D, false>(plane(keys, tile_first), tile_first * KEYS % PAGE, 0);
    for (int tile = tile_first; tile <= tile_last; ++tile) {
        const int base = tile * KEYS;
        put<D>(buffer, next);
        sync_block();  // the keys are there
        next = fetch<D, true>(plane(values, tile), base % PAGE, written - base);
        float s[Tile<D>::SCORES][8] = {};
        multiply<Tile<D>::SCORES, Tile<D>::OCTETS, KEYS>(s, queries, buffer, side * WARP,
                                                         quarter * Tile<D>::SCORES * 8);
        score<D>(s, block, maxima, base, side, quarter);
        sync_block();  // all maxima are there, and nobody reads the keys any more
        float factor[2];
        weigh<D>(s, weights, maxima, running, factor, side, quarter);
        put<D>(buffer, next);
        sync_block();  // weights and values are there
        const int after = min(tile + 1, tile_last);
        next = fetch<D, false>(plane(keys, after), after * KEYS % PAGE, 0);
#pragma unroll
        for (int n = 0; n < SUMS * 8; ++n) c[n / 8][n % 8] *= factor[n / 2 % 2];
        multiply<SUMS, Tile<D>::KEY_OCTETS, D>(c, weights, buffer, side * WARP, quarter * SUMS * 8);
        sync_block();  // nobody reads weights and values any more
    }

    total(running.sum, maxima, side, quarter);
#pragma unroll
    for (int n = 0; n < SUMS * 8; n += 2) {
        const int row = side * WARP + row_of(lane, n % 8);
        if (!block.has(row)) continue;
        const float sum = running.sum[n / 2 % 2];
        half* to = y + block.at(row) * D + (quarter * SUMS + n / 8) * 8 + column_of(lane, n % 8);
        const u32 pair = pack2(to_f16(c[n / 8][n % 8] / sum), to_f16(c[n / 8][n % 8 + 1] / sum));
        store(reinterpret_cast<u32*>(to), pair);
    }
}
