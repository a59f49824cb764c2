// rope: from projections to queries and cached keys and values.  Wrapper: phaseloop/kernels/rope.py.
//
//   angles    turns[t,i] = factor * (cos, sin)(positions[stream_i, t] * frequencies[i])
//   rope_kv   q[t,h,:] = turn(norm(q[t,h,:])), to q_out
//             k[t,h,:] = turn(norm(k[t,h,:])), v[t,h,:]: to the cache, at positions[t] of the lane
//   norm(x) = x * rsqrt(mean x^2 + epsilon) * weight, or x where there is no weight;
//   turn(x): for pair i of the first R dimensions, with (c, s) = turns[t,i],
//             (x_a, x_b) -> (x_a c - x_b s, x_a s + x_b c).  ADJACENT: (a, b) = (2i, 2i + 1), else
//             (i, i + R / 2).
//
// Shapes     angles: positions i32 [streams, T]; streams i32 [R / 2], the stream of each pair (M-RoPE),
//            or null: all 0; frequencies f64 [R / 2]; turns f32 [T, R / 2, 2].
//            rope_kv: q f32 [T, H, D]; k, v f32 [T, HKV, D]; weights f32 [D] or null; lanes,
//            positions i32 [T]; table i32 [lanes, pages]; q_out f16 [T, H, D]; keys, values and
//            their scales as kv.cuh has them.  16 | R <= D, 32 | D <= 256.
//            A row whose position is negative is nobody's: nothing of it is read or written.
// Effects    each (page, token) of the cache is written by one row at most: who calls sees to it.
// Numerics   angles in f64, as a position of 10^6 leaves no f32 digit of its angle; the rest in f32.
//            Queries and F16 keys and values are rounded once.  KvQ8 as GGML's Q8_0: the scale is the
//            largest magnitude of 32 / 127, rounded to f16 after the codes are made of it.
// Mapping    angles: a block per row, a thread per pair.  rope_kv: a warp per row and head (H of q,
//            then HKV of k and of v); a lane holds 8 dimensions, and a pair's other half comes from
//            another lane.
// Roofline   reads 4 B and writes 2 B per element: bytes bound it.  T = 1, H = 32, HKV = 8, D = 128:
//            37 KB, a launch outweighs it.  T = 2048: 76 MB, 84 us.  A value's token is 2 bytes of
//            each piece, which only a chunk's neighbours make whole, in L2.
// Measured   not yet, for want of a device.
#include "kv.cuh"

constexpr int WARPS = 4, THREADS = WARPS * WARP;

KERNEL(THREADS, 4)
angles(const int* positions, const int* streams, const double* frequencies, float2* turns,
       float factor, int T, int pairs) {
    const int row = blockIdx.x;
    for (int pair = threadIdx.x; pair < pairs; pair += THREADS) {
        const int stream = streams ? load_constant(streams + pair) : 0;
        const int position = load_constant(positions + size_t(stream) * T + row);
        const double angle = double(position) * load_constant(frequencies + pair);
        const float2 turn = {float(cos(angle)) * factor, float(sin(angle)) * factor};
        store(turns + size_t(row) * pairs + pair, turn);
    }
}

struct Octet {
    float x[OCTET];
};

DEVICE Octet load_octet(const float* from SITE) {
    const float4* at = reinterpret_cast<const float4*>(from);
    const float4 a = load_constant(at AT), b = load_constant(at + 1 AT);
    return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
}

DEVICE uint4 halves_of(const Octet& o) {
    return {pack2(to_f16(o.x[0]), to_f16(o.x[1])), pack2(to_f16(o.x[2]), to_f16(o.x[3])),
            pack2(to_f16(o.x[4]), to_f16(o.x[5])), pack2(to_f16(o.x[6]), to_f16(o.x[7]))};
}

DEVICE void normalise(Octet& o, const float* weight, float epsilon, int D, bool has SITE) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < OCTET; ++j) sum = fmaf(o.x[j], o.x[j], sum);
    const float factor = rsqrt_f32(warp_sum(sum AT) / float(D) + epsilon);
    if (!has) return;
    const Octet w = load_octet(weight + threadIdx.x % WARP * OCTET AT);
#pragma unroll
    for (int j = 0; j < OCTET; ++j) o.x[j] = o.x[j] * factor * w.x[j];
}

// `turns` is the row's; R dimensions turn.
template <bool ADJACENT>
DEVICE void turn(Octet& o, const float2* turns, int R SITE) {
    const int lane = threadIdx.x % WARP;
    const bool turns_here = lane < R / OCTET;
    if (ADJACENT) {
        if (!turns_here) return;
        const Octet t = load_octet(reinterpret_cast<const float*>(turns + lane * OCTET / 2) AT);
#pragma unroll
        for (int j = 0; j < OCTET; j += 2) {
            const float a = o.x[j], b = o.x[j + 1];
            o.x[j] = a * t.x[j] - b * t.x[j + 1];
            o.x[j + 1] = a * t.x[j + 1] + b * t.x[j];
        }
        return;
    }
    const int half_lanes = R / 2 / OCTET;
    const bool is_first = lane < half_lanes;
    Octet other;
#pragma unroll
    for (int j = 0; j < OCTET; ++j) {
        other.x[j] = shuffle(o.x[j], (is_first ? lane + half_lanes : lane - half_lanes) & 31 AT);
    }
    if (!turns_here) return;
    const float2* mine = turns + (is_first ? lane : lane - half_lanes) * OCTET;
    const Octet low = load_octet(reinterpret_cast<const float*>(mine) AT);
    const Octet high = load_octet(reinterpret_cast<const float*>(mine + OCTET / 2) AT);
#pragma unroll
    for (int j = 0; j < OCTET; ++j) {
        const Octet& t = j < 4 ? low : high;
        const float c = t.x[j % 4 * 2], s = t.x[j % 4 * 2 + 1];
        o.x[j] = is_first ? o.x[j] * c - other.x[j] * s : other.x[j] * s + o.x[j] * c;
    }
}

// Where a row's key or value goes: `elements` and `scales` of one head of one page.
struct Place {
    void* elements;
    half* scales;
    int token;
};

template <bool IS_KEY>
DEVICE void write_f16(const Place& to, const Octet& o, int D SITE) {
    const int dim = threadIdx.x % WARP * OCTET;
    half* plane = static_cast<half*>(to.elements);
    if (IS_KEY) {
        store(reinterpret_cast<uint4*>(plane + key_at<KvF16>(to.token, dim)), halves_of(o) AT);
        return;
    }
#pragma unroll
    for (int j = 0; j < OCTET; ++j) {
        store(plane + value_at<KvF16>(to.token, dim + j, D), to_f16(o.x[j]) AT);
    }
}

template <bool IS_KEY>
DEVICE void write_q8(const Place& to, const Octet& o, int D, bool has SITE) {
    const int dim = threadIdx.x % WARP * OCTET;
    float largest = 0.0f;
#pragma unroll
    for (int j = 0; j < OCTET; ++j) largest = fmaxf(largest, fabsf(o.x[j]));
    largest = fmaxf(largest, shuffle_xor(largest, 1 AT));
    largest = fmaxf(largest, shuffle_xor(largest, 2 AT));  // of the group's four lanes
    if (!has) return;
    const float scale = largest / 127.0f, inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    u8* plane = static_cast<u8*>(to.elements);
    u32 words[2] = {};
#pragma unroll
    for (int j = 0; j < OCTET; ++j) {
        const u32 code = u32(int(roundf(o.x[j] * inverse))) & 0xff;
        if (!IS_KEY) store(plane + value_at<KvQ8>(to.token, dim + j, D), u8(code) AT);
        words[j / 4] |= code << 8 * (j % 4);
    }
    if (IS_KEY) {
        store(reinterpret_cast<uint2*>(plane + key_at<KvQ8>(to.token, dim)),
              uint2{words[0], words[1]} AT);
    }
    if (dim % GROUP == 0) store(to.scales + scale_at(to.token, dim), to_f16(scale) AT);
}

template <class Kind, bool IS_KEY>
DEVICE void write(const Place& to, const Octet& o, int D, bool has SITE) {
    if constexpr (Kind::PIECE == KvQ8::PIECE) {
        write_q8<IS_KEY>(to, o, D, has AT);
    } else {
        if (has) write_f16<IS_KEY>(to, o, D AT);
    }
}

template <class Kind, bool ADJACENT>
KERNEL(THREADS, 8)
rope_kv(const float* q, const float* k, const float* v, const float* q_weight,
        const float* k_weight, const float2* turns, const int* lanes, const int* positions,
        const int* table, half* q_out, void* keys, half* key_scales, void* values,
        half* value_scales, float epsilon, int H, int HKV, int D, int R, int pages) {
    const int lane = threadIdx.x % WARP, row = blockIdx.x;
    const int number = blockIdx.y * WARPS + threadIdx.x / WARP;  // of the head, q then k then v
    const int position = load_constant(positions + row);
    if (number >= H + 2 * HKV || position < 0) return;  // a whole warp
    const bool has = lane < D / OCTET, is_query = number < H;
    const bool is_key = !is_query && number < H + HKV;
    const int head = is_query ? number : (number - H) % HKV;
    const float* source = is_query ? q + (size_t(row) * H + head) * D
                                   : (is_key ? k : v) + (size_t(row) * HKV + head) * D;
    Octet o = {};
    if (has) o = load_octet(source + lane * OCTET);
    if (is_query || is_key) {
        const float* weight = is_query ? q_weight : k_weight;
        if (weight) normalise(o, weight, epsilon, D, has);
        turn<ADJACENT>(o, turns + size_t(row) * (R / 2), R);
    }
    if (is_query) {
        half* to = q_out + (size_t(row) * H + head) * D + lane * OCTET;
        if (has) store(reinterpret_cast<uint4*>(to), halves_of(o));
        return;
    }
    const int page = load_constant(table + size_t(load_constant(lanes + row)) * pages +
                                   position / PAGE);
    const size_t bytes = plane_at(page, head, HKV, D) * 16 / Kind::PIECE;
    const size_t before = scales_at(page, head, HKV, D);
    if (is_key) {
        const Place to = {static_cast<u8*>(keys) + bytes, key_scales + before, position % PAGE};
        write<Kind, true>(to, o, D, has);
    } else {
        const Place to = {static_cast<u8*>(values) + bytes, value_scales + before, position % PAGE};
        write<Kind, false>(to, o, D, has);
    }
}
