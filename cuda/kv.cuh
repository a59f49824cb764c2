// kv: where the keys and values of a layer lie.  Plans: phaseloop/kernels/kv.py.
//
// A sequence's token at position p lies in page table[p / 256] as token p % 256 of it, whatever
// else is cached; so a KV tile is the same tokens for everybody who reads it.  Within a page, each
// KV head has a plane of its own, made of 16-byte pieces that are operands of the tensor cores as
// they are, and that a warp reads 512 bytes at a time:
//
//   KvF16  keys    f16 [pages][HKV][D / 8][256][8]    a piece is 8 dimensions of a token
//          values  f16 [pages][HKV][256 / 8][D][8]    a piece is 8 tokens of a dimension
//   KvQ8   keys    i8 [pages][HKV][D / 16][256][16], values i8 [pages][HKV][256 / 16][D][16];
//          scales of both: f16 [pages][HKV][D / 32][256], one per token and 32 dimensions.
//
// D, the width of a head, is a multiple of 32 up to 256.
#pragma once
#include "common.cuh"

constexpr int PAGE = 256;        // tokens
constexpr int OCTET = 8;         // halves of a piece
constexpr int GROUP = 32;        // dimensions that share a scale of KvQ8
constexpr int WIDTH_MAX = 256;   // of a head

struct KvF16 { static constexpr int PIECE = 8; };   // elements of 16 bytes
struct KvQ8 { static constexpr int PIECE = 16; };

// Elements before the plane of a head in a page, and scales before its scales.
DEVICE size_t plane_at(int page, int head, int heads, int D) {
    return (size_t(page) * heads + head) * D * PAGE;
}
DEVICE size_t scales_at(int page, int head, int heads, int D) {
    return plane_at(page, head, heads, D) / GROUP;
}

// Elements before a key's dimension, and before a value's, within a plane.
template <class Kind>
DEVICE int key_at(int token, int dim) {
    return (dim / Kind::PIECE * PAGE + token) * Kind::PIECE + dim % Kind::PIECE;
}
template <class Kind>
DEVICE int value_at(int token, int dim, int D) {
    return (token / Kind::PIECE * D + dim) * Kind::PIECE + token % Kind::PIECE;
}
DEVICE int scale_at(int token, int dim) { return dim / GROUP * PAGE + token; }

// Four codes of KvQ8 as halves, exactly: with its sign bit flipped, a code is c + 128, which makes
// the half 1024 + 128 + c when it becomes the low byte of 0x6400.
DEVICE void halves_of_codes(u32 codes, half2& low, half2& high) {
    codes ^= 0x80808080u;
    const half2 bias = half2_of(0x64806480u);  // 1152
    low = sub2(half2_of(__byte_perm(codes, 0x64646464u, 0x4140)), bias);
    high = sub2(half2_of(__byte_perm(codes, 0x64646464u, 0x4342)), bias);
}
