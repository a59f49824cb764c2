// rank: numbered scores as integers that compare: higher scores first, of equal ones the lower
// number.
#pragma once
#include "common.cuh"

// Orders scores as unsigned integers, and of equal ones the lower number higher.  0 is below all, a
// NaN above.
DEVICE u64 key_of(float score, int number) {
    if (score == 0.0f) score = 0.0f;  // the negative one too
    const u32 bits = f32_bits(score);
    const u32 rank = score != score ? 0xffffffffu : bits >> 31 ? ~bits : bits | 0x80000000u;
    return u64(rank) << 32 | u32(~number);
}
DEVICE int number_of(u64 key) { return int(~u32(key)); }
DEVICE float score_of(u64 key) {
    const u32 rank = u32(key >> 32);
    return f32_of(rank >> 31 ? rank & 0x7fffffffu : ~rank);
}

DEVICE u64 best_of_warp(u64 key SITE) {
    for (int distance = WARP / 2; distance > 0; distance /= 2) {
        const u64 other = shuffle_xor(key, distance AT);
        key = other > key ? other : key;
    }
    return key;
}
