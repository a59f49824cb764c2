// heads: a head of a row in the registers of a warp, and its way to the cache.
//
// A lane holds 8 dimensions: lane l those from 8 l on; lanes beyond the head's width hold nothing.
#pragma once
#include "kv.cuh"

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
    // Magnitudes compare as their bits do, and so a NaN is the largest and makes the scale one,
    // where fmaxf would drop it and its code would be an innocent zero.
    u32 bits = 0;
#pragma unroll
    for (int j = 0; j < OCTET; ++j) bits = max(bits, f32_bits(o.x[j]) & 0x7fffffffu);
    bits = max(bits, shuffle_xor(bits, 1 AT));
    bits = max(bits, shuffle_xor(bits, 2 AT));  // of the group's four lanes
    const float largest = f32_of(bits);
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
