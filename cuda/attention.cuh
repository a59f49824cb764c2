// attention: what the kernels of prompts and of generated tokens share.
//
// Scores live in the accumulators of mma_row_col with rows of queries and columns of keys.  The
// column r of quad-pair q's product is the key that the lane with fragment_row r of q loads; lanes
// load keys in their own order (key = lane), so that loads are contiguous, and the maps below say
// where a lane finds what.
#pragma once
#include "kv.cuh"

// The score of a key that a row does not see: minus infinity.
DEVICE float never() { return f32_of(0xff800000u); }

// The row of A, or column of B, that a lane holds of its quad-pair's.
DEVICE int fragment_row(int lane) { return (lane & 3) + (lane >= 16 ? 4 : 0); }
// Of accumulator i (see common.cuh): the row among 8, and the column among 32, by lanes that load.
DEVICE int score_row(int lane, int i) { return (lane & 1) + (i & 2) + (lane >= 16 ? 4 : 0); }
DEVICE int score_column(int lane, int i) {
    return (lane & 12) + (lane & 2) + (i & 1) + 4 * (i & 4);
}

struct Scoring {
    float scale, cap;  // cap 0: none
    int window;        // keys that a row sees, its own included

    DEVICE float of(float product) const {
        const float s = product * scale;
        // s - s is 0, but NaN for an infinity, which the cap would hide.
        return cap > 0.0f ? cap * tanhf(s / cap) + (s - s) : s;
    }
    DEVICE bool sees(int row_position, int key_position) const {
        return key_position <= row_position && row_position - key_position < window;
    }
    // The first position that a row at `position` sees.
    DEVICE int first(int position) const { return max(0, position - window + 1); }
};

// Where no key is seen yet, any finite number serves as the maximum: e^(never - 0) = 0.
DEVICE float finite_maximum(float maximum) { return maximum == never() ? 0.0f : maximum; }

// 8 halves of which those from `count` on are zero: what nobody wrote may be NaN, and 0 * NaN is.
DEVICE uint4 first_halves(uint4 piece, int count) {
    const auto keep = [count](u32 pair, int at) {
        return count >= at + 2 ? pair : count == at + 1 ? pair & 0xffffu : 0u;
    };
    return {keep(piece.x, 0), keep(piece.y, 2), keep(piece.z, 4), keep(piece.w, 6)};
}

// 8 codes and their scales to halves, each product rounded once.
DEVICE uint4 scaled(u32 low_codes, u32 high_codes, uint4 scales) {
    half2 a, b, c, d;
    halves_of_codes(low_codes, a, b);
    halves_of_codes(high_codes, c, d);
    return {bits_of(mul2(a, half2_of(scales.x))), bits_of(mul2(b, half2_of(scales.y))),
            bits_of(mul2(c, half2_of(scales.z))), bits_of(mul2(d, half2_of(scales.w)))};
}
