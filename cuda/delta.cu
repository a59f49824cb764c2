// delta: gated delta nets, layers that recur instead of attending.
// Wrapper: phaseloop/kernels/delta.py.
//
//   convolve    c[t,ch] = silu(sum_j taps[ch,j] * x[t - 3 + j,ch]), rows before the lane's first
//               from its history, of which the last 3 rows are left behind; then of each head:
//               queries to length 1 / sqrt(S), keys to length 1: c / sqrt(sum c^2 + epsilon)
//   recur       of value head h, with q, k of key head h % HK:
//               state = e^(softplus(step[t,h]) * decay[h]) * state
//               state[v,:] += sigmoid(rate[t,h]) * (value[v] - state[v,:] . k) * k
//               y[t,h,v] = state[v,:] . q
//   gated_norm  y[t,h,:] = found * rsqrt(mean found^2 + epsilon) * weight * silu(gate[t,h,:])
//
// Shapes     x, c: f32 [T, C], C = (2 HK + HV) S: heads of queries, keys, values; taps: f32 [C, 4];
//            histories: f32 [cells, C, 3]; states: f32 [cells, HV, S, S]; step, rate: f32 [T, HV];
//            decay: f32 [HV]; y of recur, gate: f32 [T, HV, S]; y of gated_norm: f16 [T, HV, S].
//            Lane l's rows are firsts[l] .. firsts[l] + counts[l] - 1, in order; it reads cell
//            reads[l] and writes cell writes[l], another one.  S is 32, 64 or 128.
// Effects    a lane without rows writes no cell.  Rows of a draft that is accepted in part are
//            replayed from the cell that was read: the same bits as row by row.
// Numerics   f32, every sum in a fixed order, rows one after the other: so a row's bits depend on
//            its sequence alone, however it was cut.  Relative L2 <= 1e-5 for some hundred rows.
// Mapping    convolve: a warp per head of channels and 32 rows, a lane has S / 32 channels.
//            recur: a warp keeps 4 rows v of a head's state in registers, S / 32 elements of each
//            row per lane, through all rows of a lane.  gated_norm: a warp per row and head.
// Roofline   recur reads and writes the state: HV = 48, S = 128: 6.3 MB per lane, 7 us, whatever
//            else; 7 flop per element of it and row.  For prompts the chain of rows bounds it: some
//            400 cycles each, 0.6 ms for 2048.
// Measured   not yet, for want of a device.
#include "common.cuh"

constexpr int WARPS = 8, THREADS = WARPS * WARP;
constexpr int TAPS = 4, HISTORY = TAPS - 1;
constexpr int CONVOLVED = 32;  // rows of a warp
constexpr int KEPT = 4;        // rows of a state in a warp

struct Lane {  // of the batch
    int first, count, read, write;
};

DEVICE Lane lane_at(const int* firsts, const int* counts, const int* reads, const int* writes,
                    int lane SITE) {
    return {load_constant(firsts + lane AT), load_constant(counts + lane AT),
            load_constant(reads + lane AT), load_constant(writes + lane AT)};
}

DEVICE float sigmoid(float x) { return 1.0f / (1.0f + exp_f32(-x)); }
DEVICE float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(exp_f32(-fabsf(x))); }

// --- convolution ---------------------------------------------------------------------------------

template <int S>
KERNEL(THREADS, 4)
convolve(const float* x, const float* taps, float* histories, float* c, const int* firsts,
         const int* counts, const int* reads, const int* writes, float epsilon, int HK, int heads) {
    constexpr int EACH = S / WARP;  // channels of a lane, 32 apart
    const int head = blockIdx.x * WARPS + threadIdx.x / WARP, C = heads * S;
    const Lane lane = lane_at(firsts, counts, reads, writes, blockIdx.z);
    const int begin = blockIdx.y * CONVOLVED, end = min(begin + CONVOLVED, lane.count);
    if (head >= heads || begin >= end) return;  // a whole warp
    const int channel = head * S + threadIdx.x % WARP;
    // The lane's row t of a channel, t from -3 on.
    const auto input = [&](int t, int j) {
        const int ch = channel + j * WARP;
        if (t >= 0) return load_constant(x + size_t(lane.first + t) * C + ch);
        return load(histories + (size_t(lane.read) * C + ch) * HISTORY + HISTORY + t);
    };

    float window[EACH][TAPS], weights[EACH][TAPS];
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
        const float* from = taps + size_t(channel + j * WARP) * TAPS;
        const float4 w = load_constant(reinterpret_cast<const float4*>(from));
        weights[j][0] = w.x, weights[j][1] = w.y, weights[j][2] = w.z, weights[j][3] = w.w;
#pragma unroll
        for (int tap = 0; tap < HISTORY; ++tap) {
            window[j][tap + 1] = input(begin - HISTORY + tap, j);
        }
    }
    for (int t = begin; t < end; ++t) {
        float found[EACH], square = 0.0f;
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
            float sum = 0.0f;
#pragma unroll
            for (int tap = 0; tap < TAPS; ++tap) {
                window[j][tap] = tap < HISTORY ? window[j][tap + 1] : input(t, j);
                sum = fmaf(weights[j][tap], window[j][tap], sum);
            }
            found[j] = sum * sigmoid(sum);
            square = fmaf(found[j], found[j], square);
        }
        float factor = 1.0f;
        if (head < 2 * HK) {  // queries and keys
            factor = rsqrt_f32(warp_sum(square) + epsilon);
            if (head < HK) factor *= rsqrt_f32(float(S));
        }
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
            store(c + size_t(lane.first + t) * C + channel + j * WARP, found[j] * factor);
        }
    }
    if (end < lane.count) return;
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
        const size_t at = (size_t(lane.write) * C + channel + j * WARP) * HISTORY;
        for (int tap = 0; tap < HISTORY; ++tap) store(histories + at + tap, window[j][tap + 1]);
    }
}

// --- recurrence ----------------------------------------------------------------------------------

// A lane's part of a row of S floats, 32 apart.
template <int S>
struct Part {
    float x[S / WARP];

    DEVICE void read(const float* row SITE) {
#pragma unroll
        for (int j = 0; j < S / WARP; ++j) x[j] = load(row + j * WARP + threadIdx.x % WARP AT);
    }
    DEVICE float dot(const Part& other SITE) const {
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < S / WARP; ++j) sum = fmaf(x[j], other.x[j], sum);
        return warp_sum(sum AT);
    }
};

template <int S>
KERNEL(THREADS, 2)
recur(const float* c, const float* step, const float* rate, const float* decay, float* states,
      float* y, const int* firsts, const int* counts, const int* reads, const int* writes, int HK,
      int HV) {
    const int head = blockIdx.y, C = (2 * HK + HV) * S, key_head = head % HK;
    const int v_first = (blockIdx.x * WARPS + threadIdx.x / WARP) * KEPT;
    const Lane lane = lane_at(firsts, counts, reads, writes, blockIdx.z);
    if (v_first >= S || lane.count == 0) return;  // a whole warp
    const auto state_row = [&](int cell, int kept) {
        return states + ((size_t(cell) * HV + head) * S + v_first + kept) * S;
    };
    const float slope = load_constant(decay + head);
    Part<S> state[KEPT];
#pragma unroll
    for (int kept = 0; kept < KEPT; ++kept) state[kept].read(state_row(lane.read, kept));

    for (int t = lane.first; t < lane.first + lane.count; ++t) {
        const float* row = c + size_t(t) * C;
        Part<S> q, k;
        q.read(row + key_head * S);
        k.read(row + (HK + key_head) * S);
        const float shrink = exp_f32(softplus(load_constant(step + size_t(t) * HV + head)) * slope);
        const float share = sigmoid(load_constant(rate + size_t(t) * HV + head));
        const float* value = row + (2 * HK + head) * S + v_first;
#pragma unroll
        for (int kept = 0; kept < KEPT; ++kept) {
            Part<S>& mine = state[kept];
#pragma unroll
            for (int j = 0; j < S / WARP; ++j) mine.x[j] *= shrink;
            const float missing = share * (load(value + kept) - mine.dot(k));
#pragma unroll
            for (int j = 0; j < S / WARP; ++j) mine.x[j] = fmaf(missing, k.x[j], mine.x[j]);
            const float found = mine.dot(q);
            float* to = y + (size_t(t) * HV + head) * S + v_first + kept;
            if (threadIdx.x % WARP == 0) store(to, found);
        }
    }
#pragma unroll
    for (int kept = 0; kept < KEPT; ++kept) {
        float* to = state_row(lane.write, kept) + threadIdx.x % WARP;
        for (int j = 0; j < S / WARP; ++j) store(to + j * WARP, state[kept].x[j]);
    }
}

template <int S>
KERNEL(THREADS, 8)
gated_norm(const float* found, const float* gate, const float* weight, half* y, float epsilon,
           int rows) {
    const int row = blockIdx.x * WARPS + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (row >= rows) return;  // a whole warp
    Part<S> x, g;
    x.read(found + size_t(row) * S);
    g.read(gate + size_t(row) * S);
    const float factor = rsqrt_f32(x.dot(x) / float(S) + epsilon);
#pragma unroll
    for (int j = 0; j < S / WARP; ++j) {
        const float w = load_constant(weight + j * WARP + lane);
        const float gated = x.x[j] * factor * w * g.x[j] * sigmoid(g.x[j]);
        store(y + size_t(row) * S + j * WARP + lane, to_f16(gated));
    }
}
