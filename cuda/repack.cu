// repack: a quantised matrix from the file's blocks to planes, and back.
// Wrapper: phaseloop/kernels/repack.py, where the planes are described.
//
//   repack    planes(source)[bit i of a block] = source[bit table[i] of that block]
//   restore   source[bit i of a block] = planes[bit table[i]], with the inverse table
//
// Shapes     source: u8 [rows][blocks][block_bytes], as in the file, any alignment;
//            table: u16 [8 * block_bytes], a permutation;
//            packed: wide u8 [rows/32][blocks][wide][32][16], then words [..][words][32][4], then
//            share [rows/32][ceil(blocks/per)][32][4] with per = 4 / share_bytes.
//            Rows beyond `rows` in the last group, and blocks beyond `blocks` in share, become 0.
// Numerics   bits are moved; exact.
// Mapping    a block of THREADS threads per (group of 32 rows, block of a row).  The 32 blocks are
//            staged in shared memory at a pitch of an odd number of words, so that lanes (one row
//            each) that read the same byte of theirs meet 32 different banks.
// Roofline   at load time, once: each byte is read and written once, 2 B moved per byte, and some
//            40 integer operations gather a word of 32 bits.  16 GB: 4 * 10^9 words, 1.6 * 10^11
//            operations, about 0.05 s of a V100's integer units; the PCIe bus needs 1.3 s.
// Measured   not yet, for want of a device.
#include "common.cuh"

constexpr int THREADS = 128;

struct Shape {
    int rows, block_bytes, wide, words, share_bytes;
    DEVICE int words_per_block() const { return wide * 4 + words; }
    DEVICE int pitch() const { return ((block_bytes + 3) / 4 | 1) * 4; }
};

// Where the planes of a matrix begin, and where a lane finds a word of its block in them.
struct Planes {
    u32* wide;
    u32* words;
    u32* share;
    DEVICE Planes(u8* packed, const Shape& shape)
        : wide(reinterpret_cast<u32*>(packed)),
          words(wide + size_t(gridDim.x) * gridDim.y * shape.wide * 4 * WARP),
          share(words + size_t(gridDim.x) * gridDim.y * shape.words * WARP) {}
    DEVICE u32* word(const Shape& shape, int word, int lane) const {
        const size_t tile = size_t(blockIdx.x) * gridDim.y + blockIdx.y;
        if (word < shape.wide * 4) {
            const size_t piece = tile * shape.wide + word / 4;
            return wide + (piece * WARP + lane) * 4 + word % 4;
        }
        return words + (tile * shape.words + word - shape.wide * 4) * WARP + lane;
    }
    DEVICE u8* share_of(const Shape& shape, int block, int lane) const {
        const int per = 4 / shape.share_bytes;
        const size_t row = size_t(blockIdx.x) * ((gridDim.y + per - 1) / per) + block / per;
        return reinterpret_cast<u8*>(share + row * WARP + lane) + block % per * shape.share_bytes;
    }
};

// `count` bits from bit `first` of the table on, gathered from a block in shared memory.
DEVICE u32 gather(const u8* block, const u16* table, int first, int count) {
    u32 bits = 0;
    for (int i = 0; i < count; ++i) {
        const u32 bit = load_constant(table + first + i);
        bits |= u32(load_shared(block + bit / 8) >> bit % 8 & 1) << i;
    }
    return bits;
}

KERNEL(THREADS, 8)
repack(const u8* source, const u16* table, u8* packed, int rows, int block_bytes, int wide,
       int words, int share_bytes) {
    SHARED_DYNAMIC(u8, staged);
    const Shape shape{rows, block_bytes, wide, words, share_bytes};
    const Planes planes(packed, shape);
    const int blocks = gridDim.y, block = blockIdx.y;
    for (int i = threadIdx.x; i < WARP * block_bytes; i += THREADS) {
        const int lane = i / block_bytes, byte = i % block_bytes;
        const int row = blockIdx.x * WARP + lane;
        const size_t from = (size_t(row) * blocks + block) * block_bytes + byte;
        const u8 value = row < rows ? load(source + from) : u8(0);
        store_shared(staged + lane * shape.pitch() + byte, value);
    }
    sync_block();  // the blocks are staged

    const int lane = threadIdx.x % WARP;
    const u8* mine = staged + lane * shape.pitch();
    for (int word = threadIdx.x / WARP; word < shape.words_per_block(); word += THREADS / WARP) {
        store(planes.word(shape, word, lane), gather(mine, table, word * 32, 32));
    }
    if (threadIdx.x < WARP && share_bytes > 0) {
        const int per = 4 / share_bytes, first = shape.words_per_block() * 32;
        const bool is_last = block == blocks - 1;
        for (int slot = block; slot % per > 0 ? is_last || slot == block : slot == block; ++slot) {
            u8* to = planes.share_of(shape, slot, lane);
            for (int byte = 0; byte < share_bytes; ++byte) {
                const u32 bits = slot == block ? gather(mine, table, first + byte * 8, 8) : 0;
                store(to + byte, u8(bits));
            }
        }
    }
}

KERNEL(THREADS, 8)
restore(u8* source, const u16* table, const u8* packed, int rows, int block_bytes, int wide,
        int words, int share_bytes) {
    SHARED_DYNAMIC(u8, staged);
    const Shape shape{rows, block_bytes, wide, words, share_bytes};
    const Planes planes(const_cast<u8*>(packed), shape);
    const int blocks = gridDim.y, block = blockIdx.y, lane = threadIdx.x % WARP;
    u8* mine = staged + lane * shape.pitch();
    for (int word = threadIdx.x / WARP; word < shape.words_per_block(); word += THREADS / WARP) {
        const u32 bits = load(planes.word(shape, word, lane));
        for (int byte = 0; byte < 4; ++byte) {
            store_shared(mine + word * 4 + byte, u8(bits >> byte * 8));
        }
    }
    if (threadIdx.x < WARP) {
        for (int byte = 0; byte < share_bytes; ++byte) {
            store_shared(mine + shape.words_per_block() * 4 + byte,
                         load(planes.share_of(shape, block, lane) + byte));
        }
    }
    sync_block();  // the blocks are staged

    for (int i = threadIdx.x; i < WARP * block_bytes; i += THREADS) {
        const int lane = i / block_bytes, byte = i % block_bytes;
        const int row = blockIdx.x * WARP + lane;
        if (row >= rows) continue;
        const u8 bits = u8(gather(staged + lane * shape.pitch(), table, byte * 8, 8));
        store(source + (size_t(row) * blocks + block) * block_bytes + byte, bits);
    }
}
