// quant: how each quantised type's planes become halves, eight adjacent columns at a time.
//
// A matrix [N, K] lies in planes (phaseloop/kernels/repack.py); a lane owns one of its rows.  It
// works through K in units of UNIT columns, which are strips of 32, which are four octets:
//
//   Type::fetch(planes, unit)           the unit's bits, by 16- and 4-byte loads -> Raw
//   Type::codes(raw, strip, octet, c)   eight codes, exact small integers, as four half2
//   Type::octet(raw, strip, octet)      their bits alone -> Octet, for who keeps few of a unit's
//   Type::codes(octet, c)               the same from those
//   Type::base(raw, unit, strip)        half2 (d, m): the block's scale and offset
//   Type::steps(raw, unit, strip, octet)   sub-block scale and offset, 10 bits at bits 0 and 16,
//                                       the same for STEP_OCTETS octets
//
// and a weight is  scale * code + offset  with
//   scale  = d * (step - STEP_BIAS)            or d where the type has no sub-blocks
//   offset = m * (step of the upper half)      or m
// In f32 (weight_f32) that is bit for bit what GGML's own dequantisation gives.  For the tensor
// cores (expand) scale and offset are rounded to halves, then the weight is, by one fused
// multiply-add: that is the half weight of every kernel, in prefill and decode alike.
//
// A code becomes a half without a conversion: or-ed into the mantissa of 1024 = 0x6400, it is the
// number 1024 + code; code bits at SHIFT make it 1024 + 2^SHIFT code.  One operation takes it off.
#pragma once
#include "common.cuh"

constexpr u32 ONES = 0x00010001;       // times 16 bits: in both halves
constexpr u32 F16_1024 = 0x6400;       // the bits of 1024, where one unit is the last place
constexpr u32 F16_1024_TWICE = F16_1024 * ONES;

// Both halves are 1024 + 2^SHIFT * code; gives code - BIAS.  BIAS < 2^(10 - SHIFT).  Exact.
template <int SHIFT, int BIAS>
DEVICE half2 unbias(u32 bits) {
    static_assert(BIAS >= 0 && BIAS < 1 << (10 - SHIFT), "1024 / 2^SHIFT + BIAS in one binade");
    constexpr u32 BASE = ((25 - SHIFT) << 10) + (BIAS << SHIFT);  // 2^(10 - SHIFT) + BIAS
    if constexpr (SHIFT == 0) return sub2(half2_of(bits), half2_of(BASE * ONES));
    constexpr u32 INVERSE = (15 - SHIFT) << 10;  // 2^-SHIFT
    return fma2(half2_of(bits), half2_of(INVERSE * ONES), half2_of((BASE | 0x8000) * ONES));
}

// Eight 4-bit codes of a paired word, minus BIAS.  high(p, shift) is 1024 twice, with
// pair p's upper bits above its nibbles, which are at bit `shift` and 16 over.
template <int BIAS, class High>
DEVICE void nibble_codes(u32 word, half2 (&codes)[4], High high) {
    const u32 upper = word >> 8;
    codes[0] = unbias<0, BIAS>(and_or(word, 0x000f000f, high(0, 0)));
    codes[1] = unbias<4, BIAS>(and_or(word, 0x00f000f0, high(1, 4)));
    codes[2] = unbias<0, BIAS>(and_or(upper, 0x000f000f, high(2, 0)));
    codes[3] = unbias<4, BIAS>(and_or(upper, 0x00f000f0, high(3, 4)));
}
template <int BIAS>
DEVICE void nibble_codes(u32 word, half2 (&codes)[4]) {
    nibble_codes<BIAS>(word, codes, [](int, int) { return F16_1024_TWICE; });
}

// 1024 twice, with a word's bits at `from` and 16 over moved to `to` and 16 over.
DEVICE u32 with_bits(u32 word, int from, int to, u32 mask) {
    const u32 shifted = from < to ? word << (to - from) : word >> (from - to);
    return and_or(shifted, (mask << to) * ONES, F16_1024_TWICE);
}

// Eight 4-bit codes of a natural word, as bytes of a 16-entry table.
struct Table { u32 entries[4]; };
DEVICE uint2 look_up(u32 word, const Table& table) {
    u32 found[2];
    for (int half = 0; half < 2; ++half) {
        const u32 four = word >> 16 * half, low = four & 0x7777;
        const u32 below = __byte_perm(table.entries[0], table.entries[1], low);
        const u32 above = __byte_perm(table.entries[2], table.entries[3], low);
        // Bit 3 of a code takes byte i of `above`, number 4 + i of the two.
        found[half] = __byte_perm(below, above, ((four & 0x8888) >> 1) | 0x3210);
    }
    return {found[0], found[1]};
}
// Bytes 0 and 1 (or 2 and 3) of a word, each the low byte of 1024 + byte; BIAS is taken off.
template <int BIAS>
DEVICE half2 byte_pair(u32 bytes, bool is_upper) {
    return unbias<0, BIAS>(__byte_perm(bytes, 0x64646464, is_upper ? 0x4342 : 0x4140));
}

// The bits of eight codes: a word, and a second one where a type has more than a word of them.
struct Octet { u32 word, high; };

DEVICE u32 component(const uint4& v, int i) {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// Of two blocks that share a word, the scale of the even or the odd one.
DEVICE u32 half_word(u32 word, int block) { return word >> 16 * (block & 1) & 0xffff; }

// --- planes --------------------------------------------------------------------------------------

// One lane's view of its row group.
template <class Type>
struct Planes {
    const uint4* wide;
    const u32* words;
    const u32* share;
    int blocks;

    DEVICE Planes(const uint4* data, int group, int groups, int blocks_per_row, int lane)
        : blocks(blocks_per_row) {
        constexpr int PER = Type::SHARE ? 4 / Type::SHARE : 1;
        const size_t tiles = size_t(groups) * blocks, tile = size_t(group) * blocks;
        const u32* all_words = reinterpret_cast<const u32*>(data + tiles * Type::WIDE * WARP);
        wide = data + tile * Type::WIDE * WARP + lane;
        words = all_words + tile * Type::WORDS * WARP + lane;
        share = all_words + tiles * Type::WORDS * WARP +
                size_t(group) * ((blocks + PER - 1) / PER) * WARP + lane;
    }
    // What is read once; what several units share and L1 keeps; 4 bytes of the small planes.
    DEVICE uint4 piece(int block, int i SITE) const {
        return load_once(wide + (block * Type::WIDE + i) * WARP AT);
    }
    DEVICE uint4 header(int block, int i SITE) const {
        return load_constant(wide + (block * Type::WIDE + i) * WARP AT);
    }
    DEVICE u32 word(int block, int i SITE) const {
        return load_constant(words + (block * Type::WORDS + i) * WARP AT);
    }
    DEVICE u32 shared_word(int block SITE) const {
        return load_constant(share + block * Type::SHARE / 4 * WARP AT);
    }
};

// --- types in blocks of 32 -----------------------------------------------------------------------

// Q4_0, Q5_0, Q4_1, Q5_1: nibbles, perhaps a fifth bit, (d) or (d, m) per block.
template <int CODE_BITS, bool HAS_OFFSET>
struct Legacy {
    static constexpr int BLOCK = 32, UNIT = 32, WIDE = 1, SHARE = HAS_OFFSET ? 0 : 2;
    static constexpr int WORDS = (CODE_BITS == 5) + HAS_OFFSET;
    static constexpr int STEP_BIAS = 0, CODE_BIAS = HAS_OFFSET ? 0 : CODE_BITS == 5 ? 16 : 8;
    static constexpr bool HAS_STEPS = false;
    static constexpr int STEP_OCTETS = 4;
    struct Raw { uint4 codes; u32 high, scale; };

    static DEVICE Raw fetch(const Planes<Legacy>& planes, int unit SITE) {
        Raw raw{planes.piece(unit, 0 AT), 0, 0};
        if constexpr (CODE_BITS == 5) raw.high = planes.word(unit, 0 AT);
        if constexpr (HAS_OFFSET) raw.scale = planes.word(unit, WORDS - 1 AT);
        else raw.scale = planes.shared_word(unit AT);
        return raw;
    }
    static DEVICE Octet octet(const Raw& raw, int, int octet) {
        return {component(raw.codes, octet), raw.high >> 4 * octet};
    }
    static DEVICE void codes(const Octet& o, half2 (&codes)[4], int first = 0) {
        if constexpr (CODE_BITS == 4) return nibble_codes<CODE_BIAS>(o.word, codes);
        nibble_codes<CODE_BIAS>(o.word, codes, [&](int p, int shift) {
            return with_bits(o.high, first + p, shift + 4, 1);
        });
    }
    static DEVICE void codes(const Raw& raw, int, int octet, half2 (&eight)[4]) {
        codes({component(raw.codes, octet), raw.high}, eight, 4 * octet);
    }
    static DEVICE u32 base(const Raw& raw, int unit, int) {
        return HAS_OFFSET ? raw.scale : half_word(raw.scale, unit);
    }
    static DEVICE u32 steps(const Raw&, int, int, int) { return 0; }
};
using Q4_0 = Legacy<4, false>;
using Q4_1 = Legacy<4, true>;
using Q5_0 = Legacy<5, false>;
using Q5_1 = Legacy<5, true>;

struct Q8_0 {
    static constexpr int BLOCK = 32, UNIT = 32, WIDE = 2, WORDS = 0, SHARE = 2, STEP_BIAS = 0;
    static constexpr bool HAS_STEPS = false;
    static constexpr int STEP_OCTETS = 4;
    struct Raw { uint4 codes[2]; u32 scale; };

    static DEVICE Raw fetch(const Planes<Q8_0>& planes, int unit SITE) {
        return {{planes.piece(unit, 0 AT), planes.piece(unit, 1 AT)}, planes.shared_word(unit AT)};
    }
    static DEVICE Octet octet(const Raw& raw, int, int octet) {
        const uint4 piece = octet < 2 ? raw.codes[0] : raw.codes[1];
        return {component(piece, octet % 2 * 2), component(piece, octet % 2 * 2 + 1)};
    }
    static DEVICE void codes(const Octet& o, half2 (&codes)[4]) {
        // With its sign bit flipped a byte is 128 over its value.
        const u32 words[2] = {o.word ^ 0x80808080, o.high ^ 0x80808080};
        for (int i = 0; i < 2; ++i) {
            codes[2 * i] = byte_pair<128>(words[i], false);
            codes[2 * i + 1] = byte_pair<128>(words[i], true);
        }
    }
    static DEVICE void codes(const Raw& raw, int strip, int octet, half2 (&eight)[4]) {
        codes(Q8_0::octet(raw, strip, octet), eight);
    }
    static DEVICE u32 base(const Raw& raw, int unit, int) {
        return half_word(raw.scale, unit);
    }
    static DEVICE u32 steps(const Raw&, int, int, int) { return 0; }
};

// The sixteen values of IQ4_NL and IQ4_XS (-127, -104, -83, ... 113), 128 over.
DEVICE Table iq4_table() { return {{0x3f2d1801, 0x766a5d4f, 0xa6998d81, 0xf1d9c5b5}}; }
DEVICE void iq4_codes(u32 word, half2 (&codes)[4]) {
    const uint2 bytes = look_up(word, iq4_table());
    codes[0] = byte_pair<128>(bytes.x, false);
    codes[1] = byte_pair<128>(bytes.x, true);
    codes[2] = byte_pair<128>(bytes.y, false);
    codes[3] = byte_pair<128>(bytes.y, true);
}

struct IQ4_NL {
    static constexpr int BLOCK = 32, UNIT = 32, WIDE = 1, WORDS = 0, SHARE = 2, STEP_BIAS = 0;
    static constexpr bool HAS_STEPS = false;
    static constexpr int STEP_OCTETS = 4;
    struct Raw { uint4 codes; u32 scale; };

    static DEVICE Raw fetch(const Planes<IQ4_NL>& planes, int unit SITE) {
        return {planes.piece(unit, 0 AT), planes.shared_word(unit AT)};
    }
    static DEVICE Octet octet(const Raw& raw, int, int octet) {
        return {component(raw.codes, octet), 0};
    }
    static DEVICE void codes(const Octet& o, half2 (&codes)[4]) { iq4_codes(o.word, codes); }
    static DEVICE void codes(const Raw& raw, int, int octet, half2 (&codes)[4]) {
        iq4_codes(component(raw.codes, octet), codes);
    }
    static DEVICE u32 base(const Raw& raw, int unit, int) { return half_word(raw.scale, unit); }
    static DEVICE u32 steps(const Raw&, int, int, int) { return 0; }
};

// Codes are 4-bit floats: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.  As halves their lower
// byte is 0, so the table holds upper bytes.  d is a power of two, 2^(byte - 127).
struct MXFP4 {
    static constexpr int BLOCK = 32, UNIT = 32, WIDE = 1, WORDS = 0, SHARE = 1, STEP_BIAS = 0;
    static constexpr bool HAS_STEPS = false;
    static constexpr int STEP_OCTETS = 4;
    struct Raw { uint4 codes; u32 exponents; };

    static DEVICE Raw fetch(const Planes<MXFP4>& planes, int unit SITE) {
        return {planes.piece(unit, 0 AT), planes.shared_word(unit AT)};
    }
    static DEVICE Octet octet(const Raw& raw, int, int octet) {
        return {component(raw.codes, octet), 0};
    }
    static DEVICE void codes(const Raw& raw, int strip, int octet, half2 (&eight)[4]) {
        codes(MXFP4::octet(raw, strip, octet), eight);
    }
    static DEVICE void codes(const Octet& o, half2 (&codes)[4]) {
        const Table table = {{0x3e3c3800, 0x46444240, 0xbebcb880, 0xc6c4c2c0}};
        const uint2 bytes = look_up(o.word, table);
        codes[0] = half2_of(__byte_perm(bytes.x, 0, 0x1404));
        codes[1] = half2_of(__byte_perm(bytes.x, 0, 0x3424));
        codes[2] = half2_of(__byte_perm(bytes.y, 0, 0x1404));
        codes[3] = half2_of(__byte_perm(bytes.y, 0, 0x3424));
    }
    static DEVICE u32 base(const Raw& raw, int unit, int) {
        return bits_of(to_f16(f32_of((raw.exponents >> 8 * (unit & 3) & 0xff) << 23)));
    }
    static DEVICE u32 steps(const Raw&, int, int, int) { return 0; }
};

// Halves as they are: the weight is its code, and no scale is applied.
struct F16 {
    static constexpr int BLOCK = 32, UNIT = 32, WIDE = 4, WORDS = 0, SHARE = 0;
    static constexpr int STEP_OCTETS = 4;
    struct Raw { uint4 codes[4]; };

    static DEVICE Raw fetch(const Planes<F16>& planes, int unit SITE) {
        return {{planes.piece(unit, 0 AT), planes.piece(unit, 1 AT), planes.piece(unit, 2 AT),
                 planes.piece(unit, 3 AT)}};
    }
    static DEVICE uint4 octet(const Raw& raw, int, int octet) {
        // By comparisons, for an octet that is not known when compiling must not index registers.
        const uint4 lower = octet == 0 ? raw.codes[0] : raw.codes[1];
        const uint4 upper = octet == 2 ? raw.codes[2] : raw.codes[3];
        return octet < 2 ? lower : upper;
    }
    static DEVICE void codes(const uint4& piece, half2 (&codes)[4]) {
        for (int p = 0; p < 4; ++p) codes[p] = half2_of(component(piece, p));
    }
    static DEVICE void codes(const Raw& raw, int strip, int octet, half2 (&eight)[4]) {
        codes(F16::octet(raw, strip, octet), eight);
    }
};

// Floats: only expand_f32 knows them, since tensor cores do not.
struct F32 {
    static constexpr int BLOCK = 32, UNIT = 32, WIDE = 8, WORDS = 0, SHARE = 0;
    struct Raw { uint4 values[8]; };

    static DEVICE Raw fetch(const Planes<F32>& planes, int unit SITE) {
        Raw raw;
        for (int i = 0; i < WIDE; ++i) raw.values[i] = planes.piece(unit, i AT);
        return raw;
    }
};

// --- types in blocks of 256: each unit with its part of the sub-block scales ---------------------

// Scale and offset of one of Q4_K's and Q5_K's 8 sub-blocks, 6 bits each in the header's 12 bytes.
DEVICE u32 packed_steps(const uint4& header, int sub) {
    const bool is_upper = sub & 4;  // sub-blocks 4 to 7 keep their two highest bits elsewhere
    const u32 scales = is_upper ? (header.w & 0x0f0f0f0f) | (header.y >> 2 & 0x30303030)
                                : header.y & 0x3f3f3f3f;
    const u32 offsets = is_upper ? (header.w >> 4 & 0x0f0f0f0f) | (header.z >> 2 & 0x30303030)
                                 : header.z & 0x3f3f3f3f;
    const int shift = 8 * (sub & 3);
    return (scales >> shift & 0xff) | (offsets >> shift & 0xff) << 16;
}

template <int CODE_BITS>
struct SuperOffset {
    static constexpr int BLOCK = 256, UNIT = 32, WIDE = 9, WORDS = CODE_BITS == 5 ? 8 : 0;
    static constexpr int SHARE = 0, STEP_BIAS = 0;
    static constexpr bool HAS_STEPS = true;
    static constexpr int STEP_OCTETS = 4;
    struct Raw { uint4 codes, header; u32 high; };

    static DEVICE Raw fetch(const Planes<SuperOffset>& planes, int unit SITE) {
        const int block = unit / 8, sub = unit % 8;
        Raw raw{planes.piece(block, sub AT), planes.header(block, 8 AT), 0};
        if constexpr (CODE_BITS == 5) raw.high = planes.word(block, sub AT);
        return raw;
    }
    static DEVICE Octet octet(const Raw& raw, int, int octet) {
        return {component(raw.codes, octet), raw.high >> 4 * octet};
    }
    static DEVICE void codes(const Octet& o, half2 (&codes)[4], int first = 0) {
        if constexpr (CODE_BITS == 4) return nibble_codes<0>(o.word, codes);
        nibble_codes<0>(o.word, codes, [&](int p, int shift) {
            return with_bits(o.high, first + p, shift + 4, 1);
        });
    }
    static DEVICE void codes(const Raw& raw, int, int octet, half2 (&eight)[4]) {
        codes({component(raw.codes, octet), raw.high}, eight, 4 * octet);
    }
    // The header's first word is (d, dmin); the offset is subtracted.
    static DEVICE u32 base(const Raw& raw, int, int) { return raw.header.x ^ 0x80000000; }
    static DEVICE u32 steps(const Raw& raw, int unit, int, int) {
        return packed_steps(raw.header, unit % 8);
    }
};
using Q4_K = SuperOffset<4>;
using Q5_K = SuperOffset<5>;

struct Q6_K {
    static constexpr int BLOCK = 256, UNIT = 32, WIDE = 8, WORDS = 20, SHARE = 2, STEP_BIAS = 128;
    static constexpr bool HAS_STEPS = true;
    static constexpr int STEP_OCTETS = 2;
    struct Raw { uint4 codes; u32 high[2], steps, scale; };

    static DEVICE Raw fetch(const Planes<Q6_K>& planes, int unit SITE) {
        const int block = unit / 8, strip = unit % 8;
        return {planes.piece(block, strip AT),
                {planes.word(block, 2 * strip AT), planes.word(block, 2 * strip + 1 AT)},
                planes.word(block, 16 + strip / 2 AT) >> 16 * (strip % 2),
                planes.shared_word(block AT)};
    }
    static DEVICE Octet octet(const Raw& raw, int, int octet) {
        return {component(raw.codes, octet), (octet < 2 ? raw.high[0] : raw.high[1]) >>
                                                 8 * (octet % 2)};
    }
    static DEVICE void codes(const Octet& o, half2 (&codes)[4], int first = 0) {
        nibble_codes<32>(o.word, codes, [=](int p, int shift) {
            return with_bits(o.high, first + 2 * p, shift + 4, 3);
        });
    }
    static DEVICE void codes(const Raw& raw, int, int octet, half2 (&eight)[4]) {
        const u32 high = octet < 2 ? raw.high[0] : raw.high[1];
        codes({component(raw.codes, octet), high}, eight, 8 * (octet % 2));
    }
    static DEVICE u32 base(const Raw& raw, int unit, int) {
        return half_word(raw.scale, unit / 8);
    }
    static DEVICE u32 steps(const Raw& raw, int, int, int octet) {
        return (raw.steps ^ 0x80808080) >> 8 * (octet / 2) & 0xff;
    }
};

// Eight 2-bit codes at the lower bits of both halves of a word.  high as above.
template <int BIAS, class High>
DEVICE void crumb_codes(u32 crumbs, half2 (&codes)[4], High high) {
    codes[0] = unbias<0, BIAS>(and_or(crumbs, 0x00030003, high(0, 0)));
    codes[1] = unbias<2, BIAS>(and_or(crumbs, 0x000c000c, high(1, 2)));
    codes[2] = unbias<4, BIAS>(and_or(crumbs, 0x00300030, high(2, 4)));
    codes[3] = unbias<6, BIAS>(and_or(crumbs, 0x00c000c0, high(3, 6)));
}

struct Q2_K {
    static constexpr int BLOCK = 256, UNIT = 64, WIDE = 4, WORDS = 5, SHARE = 0, STEP_BIAS = 0;
    static constexpr bool HAS_STEPS = true;
    static constexpr int STEP_OCTETS = 2;
    struct Raw { uint4 codes; u32 steps, scale; };

    static DEVICE Raw fetch(const Planes<Q2_K>& planes, int unit SITE) {
        const int block = unit / 4, quarter = unit % 4;
        return {planes.piece(block, quarter AT), planes.word(block, quarter AT),
                planes.word(block, 4 AT)};
    }
    static DEVICE Octet octet(const Raw& raw, int strip, int octet) {
        return {component(raw.codes, 2 * strip + octet / 2) >> 8 * (octet % 2), 0};
    }
    static DEVICE void codes(const Octet& o, half2 (&codes)[4]) {
        crumb_codes<0>(o.word, codes, [](int, int) { return F16_1024_TWICE; });
    }
    static DEVICE void codes(const Raw& raw, int strip, int octet, half2 (&eight)[4]) {
        codes(Q2_K::octet(raw, strip, octet), eight);
    }
    static DEVICE u32 base(const Raw& raw, int, int) { return raw.scale ^ 0x80000000; }
    static DEVICE u32 steps(const Raw& raw, int, int strip, int octet) {
        const u32 byte = raw.steps >> 8 * (2 * strip + octet / 2);
        return (byte & 0xf) | (byte & 0xf0) << 12;
    }
};

struct Q3_K {
    static constexpr int BLOCK = 256, UNIT = 64, WIDE = 4, WORDS = 11, SHARE = 2, STEP_BIAS = 32;
    static constexpr bool HAS_STEPS = true;
    static constexpr int STEP_OCTETS = 2;
    struct Raw { uint4 codes; u32 high[2], steps, scale; };

    static DEVICE Raw fetch(const Planes<Q3_K>& planes, int unit SITE) {
        const int block = unit / 4, quarter = unit % 4;
        // A scale's four lower bits are a nibble of words 8 and 9, its two upper ones in word 10.
        const u32 lower = planes.word(block, 8 + quarter % 2 AT) >> 4 * (quarter / 2) & 0x0f0f0f0f;
        const u32 upper = planes.word(block, 10 AT) >> 2 * quarter & 0x03030303;
        return {planes.piece(block, quarter AT),
                {planes.word(block, 2 * quarter AT), planes.word(block, 2 * quarter + 1 AT)},
                lower | upper << 4, planes.shared_word(block AT)};
    }
    static DEVICE u32 high(const Raw& raw, int strip) { return strip ? raw.high[1] : raw.high[0]; }
    static DEVICE u32 crumbs(const Raw& raw, int strip, int octet) {
        return component(raw.codes, 2 * strip + octet / 2) >> 8 * (octet % 2);
    }
    static DEVICE Octet octet(const Raw& raw, int strip, int octet) {
        return {crumbs(raw, strip, octet), high(raw, strip) >> 4 * octet};
    }
    static DEVICE void codes(const Octet& o, half2 (&codes)[4], int first = 0) {
        crumb_codes<4>(o.word, codes, [=](int p, int shift) {
            return with_bits(o.high, first + p, shift + 2, 1);
        });
    }
    static DEVICE void codes(const Raw& raw, int strip, int octet, half2 (&eight)[4]) {
        codes({crumbs(raw, strip, octet), high(raw, strip)}, eight, 4 * octet);
    }
    static DEVICE u32 base(const Raw& raw, int unit, int) {
        return half_word(raw.scale, unit / 4);
    }
    static DEVICE u32 steps(const Raw& raw, int, int strip, int octet) {
        return raw.steps >> 8 * (2 * strip + octet / 2) & 0xff;
    }
};

struct IQ4_XS {
    static constexpr int BLOCK = 256, UNIT = 32, WIDE = 8, WORDS = 2, SHARE = 0, STEP_BIAS = 32;
    static constexpr bool HAS_STEPS = true;
    static constexpr int STEP_OCTETS = 4;
    struct Raw { uint4 codes; u32 scale, lower; };

    static DEVICE Raw fetch(const Planes<IQ4_XS>& planes, int unit SITE) {
        const int block = unit / 8;
        return {planes.piece(block, unit % 8 AT), planes.word(block, 0 AT),
                planes.word(block, 1 AT)};
    }
    static DEVICE Octet octet(const Raw& raw, int, int octet) {
        return {component(raw.codes, octet), 0};
    }
    static DEVICE void codes(const Octet& o, half2 (&codes)[4]) { iq4_codes(o.word, codes); }
    static DEVICE void codes(const Raw& raw, int, int octet, half2 (&codes)[4]) {
        iq4_codes(component(raw.codes, octet), codes);
    }
    static DEVICE u32 base(const Raw& raw, int, int) { return raw.scale & 0xffff; }
    // Four lower bits in the second word, two upper ones above d.
    static DEVICE u32 steps(const Raw& raw, int unit, int, int) {
        const int sub = unit % 8;
        return (raw.lower >> 4 * sub & 0xf) | (raw.scale >> (16 + 2 * sub) & 3) << 4;
    }
};

// --- weights -------------------------------------------------------------------------------------

template <class A, class B>
constexpr bool IS_SAME = false;
template <class A>
constexpr bool IS_SAME<A, A> = true;

// Half2 (scale, offset) of an octet, which others of its sub-block share.
template <class Type>
DEVICE half2 scale_of(const typename Type::Raw& raw, int unit, int strip, int octet) {
    if constexpr (IS_SAME<Type, F16>) {
        return half2_of(0);
    } else {
        const half2 base = half2_of(Type::base(raw, unit, strip));
        if constexpr (!Type::HAS_STEPS) return base;
        const u32 steps = Type::steps(raw, unit, strip, octet);
        constexpr u32 BASE = (F16_1024 + Type::STEP_BIAS) | F16_1024 << 16;
        return mul2(sub2(half2_of(steps | F16_1024_TWICE), half2_of(BASE)), base);
    }
}

template <class Type>
DEVICE void apply_scale(const half2 (&codes)[4], half2 scale, u32 (&pairs)[4]) {
    const half2 d = both(low_of(bits_of(scale))), m = both(high_of(bits_of(scale)));
    for (int p = 0; p < 4; ++p) {
        pairs[p] = bits_of(IS_SAME<Type, F16> ? codes[p] : fma2(codes[p], d, m));
    }
}

// Eight adjacent weights of the lane's row as halves, ready to be an operand of mma_row_col.
template <class Type>
DEVICE void expand(const typename Type::Raw& raw, int strip, int octet, half2 scale,
                   u32 (&pairs)[4]) {
    half2 codes[4];
    Type::codes(raw, strip, octet, codes);
    apply_scale<Type>(codes, scale, pairs);
}

// Half a strip of a lane's row, octets 2 `part` and on: what is kept of a unit's bits meanwhile.
template <class Type>
struct HalfStrip {
    decltype(Type::octet(typename Type::Raw{}, 0, 0)) octets[2];
    half2 scale;  // no sub-block is less than two octets

    DEVICE HalfStrip(const typename Type::Raw& raw, int unit, int strip, int part)
        : octets{Type::octet(raw, strip, 2 * part), Type::octet(raw, strip, 2 * part + 1)},
          scale(scale_of<Type>(raw, unit, strip, 2 * part)) {}

    DEVICE uint4 expanded(int octet) const {
        half2 codes[4];
        u32 pairs[4];
        Type::codes(octets[octet], codes);
        apply_scale<Type>(codes, scale, pairs);
        return {pairs[0], pairs[1], pairs[2], pairs[3]};
    }
};

// The same in f32: scale * code + offset, rounded once, scale and offset exact.
template <class Type>
DEVICE void expand_f32(const typename Type::Raw& raw, int unit, int strip, int octet,
                       float (&weights)[8]) {
    if constexpr (IS_SAME<Type, F32>) {
        for (int i = 0; i < 8; ++i) {
            weights[i] = f32_of(component(raw.values[2 * octet + i / 4], i % 4));
        }
    } else {
        half2 codes[4];
        Type::codes(raw, strip, octet, codes);
        float scale = 1.0f, offset = 0.0f;
        if constexpr (!IS_SAME<Type, F16>) {
            const u32 base = Type::base(raw, unit, strip);
            scale = to_f32(low_of(base)), offset = to_f32(high_of(base));
            if constexpr (Type::HAS_STEPS) {
                const u32 steps = Type::steps(raw, unit, strip, octet);
                scale *= float(int(steps & 0xffff) - Type::STEP_BIAS);
                offset *= float(steps >> 16);
            }
        }
        for (int i = 0; i < 8; ++i) {
            const u32 pair = bits_of(codes[i / 2]);
            weights[i] = fmaf(scale, to_f32(i % 2 ? high_of(pair) : low_of(pair)), offset);
        }
    }
}
