// rope: from projections to queries and cached keys and values.
// Wrapper: phaseloop/kernels/rope.py.
//
//   angles    turns[t,i] = factor * (cos, sin)(positions[stream_i, t] * frequencies[i])
//   rope_kv   q[t,h,:] = turn(norm(q[t,h,:])), to q_out
//             k[t,h,:] = turn(norm(k[t,h,:])), v[t,h,:]: to the cache, at positions[t] of the lane
//   norm(x) = x * rsqrt(mean x^2 + epsilon) * weight, or x where there is no weight;
//   turn(x): for pair i of the first R dimensions, with (c, s) = turns[t,i],
//             (x_a, x_b) -> (x_a c - x_b s, x_a s + x_b c).  ADJACENT: (a, b) = (2i, 2i + 1), else
//             (i, i + R / 2).
//
// Shapes     angles: positions i32 [streams, T]; streams i32 [R / 2], the stream of each pair
//            (M-RoPE), or null: all 0; frequencies f64 [R / 2]; turns f32 [T, R / 2, 2].
//            rope_kv: q f32 [T, H, Q], a head's first D of Q; k, v f32 [T, HKV, D]; weights f32 [D]
//            or null; lanes, positions i32 [T]; table i32 [lanes, pages]; q_out f16 [T, H, D];
//            keys, values and their scales as kv.cuh has them.  16 | R <= D, 32 | D <= 256.
//            A row whose position is negative is nobody's: nothing of it is read or written.
// Effects    each (page, token) of the cache is written by one row at most: who calls sees to it.
// Numerics   angles in f64, as a position of 10^6 leaves no f32 digit of its angle; the rest in
//            f32. Queries and F16 keys and values are rounded once.  KvQ8 as GGML's Q8_0: the scale
//            is the largest magnitude of 32 / 127, rounded to f16 after the codes are made of it.
// Mapping    angles: a block per row, a thread per pair.  rope_kv: a warp per row and head (H of q,
//            then HKV of k and of v); a lane holds 8 dimensions, and a pair's other half comes from
//            another lane.
// Roofline   reads 4 B and writes 2 B per element: bytes bound it.  T = 1, H = 32, HKV = 8, D =
//            128: 37 KB, a launch outweighs it.  T = 2048: 76 MB, 84 us.  A value's token is 2
//            bytes of each piece, which only a chunk's neighbours make whole, in L2.
// Measured   not yet, for want of a device.
#include "heads.cuh"

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

template <class Kind, bool ADJACENT>
KERNEL(THREADS, 8)
rope_kv(const float* q, const float* k, const float* v, const float* q_weight,
        const float* k_weight, const float2* turns, const int* lanes, const int* positions,
        const int* table, half* q_out, void* keys, half* key_scales, void* values,
        half* value_scales, float epsilon, int H, int HKV, int D, int Q, int R,
        int pages) {
    const int lane = threadIdx.x % WARP, row = blockIdx.x;
    const int number = blockIdx.y * WARPS + threadIdx.x / WARP;  // of the head, q then k then v
    const int position = load_constant(positions + row);
    if (number >= H + 2 * HKV || position < 0) return;  // a whole warp
    const bool has = lane < D / OCTET, is_query = number < H;
    const bool is_key = !is_query && number < H + HKV;
    const int head = is_query ? number : (number - H) % HKV;
    const float* source = is_query ? q + (size_t(row) * H + head) * Q
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
