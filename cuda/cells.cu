// cells: what happens to cached keys and values between rounds.
// Wrapper: phaseloop/kernels/cells.py.
//
//   copy_pages   page pairs[i][1] = page pairs[i][0], of any plane of a cache: a fork's last page
//   unpack       the same from KvQ8 to KvF16, each product of code and scale rounded once: what
//                attention_prefill reads, once per chunk
//   shift        a sequence loses [start, start + count) of its `length` positions: for every p in
//                [start, length - count), the key at p = turn(the key that was at p + count), the
//                value at p = the value that was there
//
// Shapes     planes: kv.cuh; copy_pages takes one as pages of page_words 16-byte words; pairs: i32
//            [P, 2], no page both read and written; turns: f32 [R / 2, 2], the (cos, sin) of
//            -count positions, as rope.cu makes them; source, target: i32 [pages], page tables
//            that share no page from start on.
// Numerics   copies are exact.  Keys turn in f32 and are rounded (KvQ8: quantised) again.
// Mapping    copy_pages: a block per 256 words and pair.  unpack: a thread per 16 bytes of KvF16.
//            shift: a warp per position and head, keys and values apart.
// Roofline   bytes, each read and written once: a page of 8 heads of 128 is 1 MB, 1.2 us.
//            A shift of 32768 positions is 270 MB per layer, 0.3 ms, and a rare event.
// Measured   not yet, for want of a device.
#include "attention.cuh"
#include "heads.cuh"

constexpr int THREADS = 256, WARPS = THREADS / WARP;

KERNEL(THREADS, 8)
copy_pages(uint4* plane, const int* pairs, int page_words) {
    const int word = blockIdx.x * THREADS + threadIdx.x;
    if (word >= page_words) return;
    const int source = load_constant(pairs + 2 * blockIdx.y);
    const int target = load_constant(pairs + 2 * blockIdx.y + 1);
    store(plane + size_t(target) * page_words + word,
          load(plane + size_t(source) * page_words + word));
}

// blockIdx.z is 2 * pair, or 2 * pair + 1 for the values.
KERNEL(THREADS, 8)
unpack(const uint4* keys, const half* key_scales, const uint4* values, const half* value_scales,
       const int* pairs, uint4* keys_out, uint4* values_out, int heads, int D) {
    const int i = blockIdx.x * THREADS + threadIdx.x;  // of the head's pieces in the page
    if (i >= D * PAGE / OCTET) return;
    const int pair = blockIdx.z / 2, head = blockIdx.y;
    const size_t from = plane_at(load_constant(pairs + 2 * pair), head, heads, D);
    const size_t to = plane_at(load_constant(pairs + 2 * pair + 1), head, heads, D) / OCTET + i;
    if (blockIdx.z % 2 == 0) {
        const int octet = i / PAGE, token = i % PAGE;
        const uint4 codes = load_constant(keys + from / KvQ8::PIECE + octet / 2 * PAGE + token);
        const half* at = key_scales + from / GROUP + scale_at(token, octet * OCTET);
        const u32 scale = bits_of(both(load_constant(at)));
        const uint4 scales = {scale, scale, scale, scale};
        store(keys_out + to, octet % 2 ? scaled(codes.z, codes.w, scales)
                                       : scaled(codes.x, codes.y, scales));
    } else {
        const int octet = i / D, dim = i % D;
        const uint4 codes = load_constant(values + from / KvQ8::PIECE + octet / 2 * D + dim);
        const half* at = value_scales + from / GROUP + scale_at(octet * OCTET, dim);
        const uint4 scales = load_constant(reinterpret_cast<const uint4*>(at));
        store(values_out + to, octet % 2 ? scaled(codes.z, codes.w, scales)
                                         : scaled(codes.x, codes.y, scales));
    }
}

// --- shift ---------------------------------------------------------------------------------------

// A lane's 8 dimensions of a key.
template <class Kind>
DEVICE Octet read_key(const Place& from SITE) {
    const int dim = threadIdx.x % WARP * OCTET;
    Octet o;
    if constexpr (Kind::PIECE == KvQ8::PIECE) {
        const u8* plane = static_cast<const u8*>(from.elements) + key_at<KvQ8>(from.token, dim);
        const uint2 codes = load(reinterpret_cast<const uint2*>(plane) AT);
        const float scale = to_f32(load(from.scales + scale_at(from.token, dim) AT));
#pragma unroll
        for (int j = 0; j < OCTET; ++j) {
            const u32 code = (j < 4 ? codes.x : codes.y) >> 8 * (j % 4) & 0xff;
            o.x[j] = float(int(code ^ 0x80) - 128) * scale;
        }
    } else {
        const half* plane = static_cast<const half*>(from.elements);
        const uint4 piece =
            load(reinterpret_cast<const uint4*>(plane + key_at<KvF16>(from.token, dim)) AT);
        const u32 words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
        for (int j = 0; j < OCTET; ++j) {
            o.x[j] = to_f32(j % 2 ? high_of(words[j / 2]) : low_of(words[j / 2]));
        }
    }
    return o;
}

template <class Element, class Kind>
DEVICE void copy_value(const Place& to, const Place& from, int D SITE) {
    const Element* source = static_cast<const Element*>(from.elements);
    Element* target = static_cast<Element*>(to.elements);
    for (int dim = threadIdx.x % WARP; dim < D; dim += WARP) {
        const Element element = load(source + value_at<Kind>(from.token, dim, D) AT);
        store(target + value_at<Kind>(to.token, dim, D), element AT);
    }
    if (Kind::PIECE != KvQ8::PIECE) return;
    for (int dim = threadIdx.x % WARP * GROUP; dim < D; dim += WARP * GROUP) {
        const half scale = load(from.scales + scale_at(from.token, dim) AT);
        store(to.scales + scale_at(to.token, dim), scale AT);
    }
}

template <class Kind, bool ADJACENT>
KERNEL(THREADS, 4)
shift(void* keys, half* key_scales, void* values, half* value_scales, const float2* turns,
      const int* source, const int* target, int start, int count, int length, int heads, int D,
      int R) {
    const int position = start + blockIdx.x * WARPS + threadIdx.x / WARP, head = blockIdx.y;
    if (position >= length - count) return;  // a whole warp
    const auto place = [&](void* elements, half* scales, const int* table, int at) -> Place {
        const int page = load_constant(table + at / PAGE);
        const size_t bytes = plane_at(page, head, heads, D) * 16 / Kind::PIECE;
        return {static_cast<u8*>(elements) + bytes, scales + scales_at(page, head, heads, D),
                at % PAGE};
    };
    if (blockIdx.z == 0) {
        const bool has = int(threadIdx.x % WARP) < D / OCTET;
        Octet o = {};
        if (has) o = read_key<Kind>(place(keys, key_scales, source, position + count));
        turn<ADJACENT>(o, turns, R);
        write<Kind, true>(place(keys, key_scales, target, position), o, D, has);
        return;
    }
    const Place from = place(values, value_scales, source, position + count);
    const Place to = place(values, value_scales, target, position);
    if constexpr (Kind::PIECE == KvQ8::PIECE) {
        copy_value<u8, Kind>(to, from, D);
    } else {
        copy_value<half, Kind>(to, from, D);
    }
}
