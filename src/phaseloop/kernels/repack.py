"""How quantised matrices lie on the device: as planes of 16-byte pieces, 32 rows side by side.

A GGUF block (Q6_K: 210 bytes) cannot be read by 16-byte loads.  So a matrix [N, K] is repacked when
it is loaded.  Rows go in groups of 32, one per lane of a warp; whatever a lane needs of its row's
block lies beside what its neighbours need of theirs, so that a warp's load is contiguous:

    wide   [N/32][blocks][pieces][32] of 16 bytes    codes, and headers that fill a piece
    words  [N/32][blocks][words][32]  of  4 bytes    high bits, sub-block scales
    share  [N/32][blocks/per][32]     of  4 bytes    2-byte scales of two blocks, 1-byte of four

Nothing is computed: a block's bits are permuted, so the repacked matrix is no larger (but for rows
up to a multiple of 32, and a half-filled last word of the share plane) and the file's bytes can be
had back.  The permutation puts what tensor cores multiply together where two halves of a register
will be: codes k and k + 1 of `paired` fields are 16 bits apart (cuda/quant.cuh reads them).
"""

from collections.abc import Callable
from functools import cache

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from .contract import WARP, Array, KernelError, Launch, ceil_div, i32, reads, updates

Bytes = NDArray[np.uint8]
Bits = NDArray[np.intp]  # bit indices in a block: bit i of byte b is 8 b + i
THREADS = 128
F16_MAX = 65504.0
F16_FINE_MIN = 2.0**-13  # where the largest is less, F16 has less than 12 bits of it


class Layout(Struct, frozen=True):
    """A type's blocks: `block` values in `block_bytes`, split into planes."""

    block: int
    block_bytes: int
    wide: int  # pieces of 16 bytes
    words: int
    share_bytes: int  # 0, 1 or 2


LAYOUTS = {
    "F32": Layout(32, 128, 8, 0, 0),
    "F16": Layout(32, 64, 4, 0, 0),
    "Q4_0": Layout(32, 18, 1, 0, 2),
    "Q4_1": Layout(32, 20, 1, 1, 0),
    "Q5_0": Layout(32, 22, 1, 1, 2),
    "Q5_1": Layout(32, 24, 1, 2, 0),
    "Q8_0": Layout(32, 34, 2, 0, 2),
    "IQ4_NL": Layout(32, 18, 1, 0, 2),
    "MXFP4": Layout(32, 17, 1, 0, 1),
    "Q2_K": Layout(256, 84, 4, 5, 0),
    "Q3_K": Layout(256, 110, 4, 11, 2),
    "Q4_K": Layout(256, 144, 9, 0, 0),
    "Q5_K": Layout(256, 176, 9, 8, 0),
    "Q6_K": Layout(256, 210, 8, 20, 2),
    "IQ4_XS": Layout(256, 136, 8, 2, 0),
}


class Packed(Struct, frozen=True):
    """A repacked matrix of `rows` (outputs) by `columns` (inputs); `data` holds its planes."""

    kind: str
    rows: int
    columns: int
    data: Array  # u8 [packed_bytes(...)], 16-byte aligned

    @property
    def layout(self) -> Layout:
        return LAYOUTS[self.kind]


def layout_of(kind: str, rows: int, columns: int) -> Layout:
    """Raises KernelError for a matrix that kernels cannot take."""
    layout = LAYOUTS.get(kind)
    if layout is None:
        raise KernelError(f"type {kind} has no kernels; there are {', '.join(sorted(LAYOUTS))}")
    if rows < 1 or columns < 1 or columns % layout.block:
        raise KernelError(f"{kind} [{rows}, {columns}]: columns must be whole blocks of "
                          f"{layout.block}")  # fmt: skip
    if ceil_div(rows, WARP) * WARP * (columns // layout.block) * layout.wide >= 1 << 31:
        raise KernelError(f"{kind} [{rows}, {columns}]: more pieces than 32-bit indices count")
    return layout


def plane_bytes(kind: str, rows: int, columns: int) -> tuple[int, int, int]:
    """Of the planes wide, words and share."""
    layout = layout_of(kind, rows, columns)
    groups, blocks = ceil_div(rows, WARP), columns // layout.block
    shared_words = ceil_div(blocks, 4 // layout.share_bytes) if layout.share_bytes else 0
    lanes = groups * WARP
    return 16 * lanes * blocks * layout.wide, 4 * lanes * blocks * layout.words, 4 * lanes * (
        shared_words
    )  # fmt: skip


def packed_bytes(kind: str, rows: int, columns: int) -> int:
    return sum(plane_bytes(kind, rows, columns))


# --- which bit goes where -------------------------------------------------------------------------


def fields(byte: int, count: int, width: int, shift: int = 0) -> Bits:
    """[count, width]: one field of `width` bits at `shift` of each byte from `byte` on."""
    return 8 * (byte + np.arange(count))[:, None] + shift + np.arange(width)


def raw(byte: int, count: int) -> Bits:
    return fields(byte, count, 8).reshape(-1)


def natural(codes: Bits) -> Bits:
    return codes.reshape(-1)


def paired(codes: Bits) -> Bits:
    """In each 32-bit word, codes 0, 2, 4, ... in the lower half and 1, 3, 5, ... in the upper."""
    width = codes.shape[1]
    return codes.reshape(-1, 16 // width, 2, width).transpose(0, 2, 1, 3).reshape(-1)


def nibbles(byte: int, run: int, count: int) -> Bits:
    """Runs of bytes whose lower nibbles are the next `run` codes, the upper ones those after."""
    runs = range(byte, byte + count // 2, run)
    return np.concatenate([fields(start, run, 4, shift) for start in runs for shift in (0, 4)])


def crumbs(byte: int) -> Bits:
    """256 codes of 2 bits: of every 32 bytes the lowest two bits are the first 32 codes."""
    return np.concatenate(
        [fields(start, 32, 2, shift) for start in (byte, byte + 32) for shift in (0, 2, 4, 6)]
    )


def strands(byte: int) -> Bits:
    """256 codes of 1 bit: bit j of 32 bytes are codes 32 j and on."""
    return np.concatenate([fields(byte, 32, 1, shift) for shift in range(8)])


def bits_of_u32(byte: int) -> Bits:
    """32 codes of 1 bit in order."""
    return (8 * byte + np.arange(32))[:, None]


def q6_nibbles(byte: int) -> Bits:
    halves = (byte, byte + 64)
    return np.concatenate([fields(half, 64, 4, shift) for half in halves for shift in (0, 4)])


ORDERS: dict[str, Callable[[], list[Bits]]] = {
    "F32": lambda: [raw(0, 128)],
    "F16": lambda: [raw(0, 64)],
    "Q4_0": lambda: [paired(nibbles(2, 16, 32)), raw(0, 2)],
    "Q4_1": lambda: [paired(nibbles(4, 16, 32)), raw(0, 4)],
    "Q5_0": lambda: [paired(nibbles(6, 16, 32)), paired(bits_of_u32(2)), raw(0, 2)],
    "Q5_1": lambda: [paired(nibbles(8, 16, 32)), paired(bits_of_u32(4)), raw(0, 4)],
    "Q8_0": lambda: [raw(2, 32), raw(0, 2)],
    "IQ4_NL": lambda: [natural(nibbles(2, 16, 32)), raw(0, 2)],
    "MXFP4": lambda: [natural(nibbles(1, 16, 32)), raw(0, 1)],
    "Q2_K": lambda: [paired(crumbs(16)), raw(0, 16), raw(80, 4)],
    "Q3_K": lambda: [paired(crumbs(32)), paired(strands(0)), raw(96, 12), raw(108, 2)],
    "Q4_K": lambda: [paired(nibbles(16, 32, 256)), raw(0, 16)],
    "Q5_K": lambda: [paired(nibbles(48, 32, 256)), raw(0, 16), paired(strands(16))],
    "Q6_K": lambda: [paired(q6_nibbles(0)), paired(crumbs(128)), raw(192, 16), raw(208, 2)],
    "IQ4_XS": lambda: [natural(nibbles(8, 16, 256)), raw(0, 8)],
}


@cache
def sources(kind: str) -> Bits:
    """For each bit of a block's planes (wide, words, share), where it lies in the file's block."""
    order = np.concatenate(ORDERS[kind]())
    assert np.array_equal(np.sort(order), np.arange(8 * LAYOUTS[kind].block_bytes)), kind
    return order


# --- on the host ----------------------------------------------------------------------------------


def permute(blocks: Bytes, order: Bits) -> Bytes:
    """[..., block_bytes]: bit i of a result is bit order[i] of its block."""
    bits = np.unpackbits(blocks, axis=-1, bitorder="little")
    return np.packbits(bits[..., order], axis=-1, bitorder="little")


def pack(kind: str, rows: int, columns: int, data: Bytes) -> Bytes:
    """Repack a matrix's bytes as they lie in the file."""
    layout = layout_of(kind, rows, columns)
    blocks = columns // layout.block
    permuted = permute(data.reshape(rows, blocks, layout.block_bytes), sources(kind))
    padded = np.zeros((ceil_div(rows, WARP) * WARP, *permuted.shape[1:]), np.uint8)
    padded[:rows] = permuted
    wide, words, share = split(padded.reshape(-1, WARP, blocks, layout.block_bytes), layout)
    return np.concatenate(
        [
            wide.transpose(0, 2, 3, 1, 4).reshape(-1),
            words.transpose(0, 2, 3, 1, 4).reshape(-1),
            pad_share(share, layout).transpose(0, 2, 1, 3).reshape(-1),
        ]
    )


def split(tiles: Bytes, layout: Layout) -> tuple[Bytes, Bytes, Bytes]:
    """[groups, 32, blocks, bytes] -> wide [.., pieces, 16], words [.., words, 4], share [.., b]."""
    end = 16 * layout.wide
    shape = tiles.shape[:3]
    words = tiles[..., end : end + 4 * layout.words]
    return (
        tiles[..., :end].reshape(*shape, layout.wide, 16),
        words.reshape(*shape, layout.words, 4),
        tiles[..., end + 4 * layout.words :],
    )


def pad_share(share: Bytes, layout: Layout) -> Bytes:
    """[groups, 32, blocks, b] -> [groups, 32, blocks/per, 4], the last word filled with zeros."""
    groups, lanes, blocks, size = share.shape
    if size == 0:
        return share.reshape(groups, lanes, 0, 4)
    per = 4 // layout.share_bytes
    padded = np.zeros((groups, lanes, ceil_div(blocks, per) * per, size), np.uint8)
    padded[:, :, :blocks] = share
    return padded.reshape(groups, lanes, -1, 4)


def unpack(kind: str, rows: int, columns: int, data: Bytes) -> Bytes:
    """The bytes as they lay in the file."""
    layout = layout_of(kind, rows, columns)
    groups, blocks = ceil_div(rows, WARP), columns // layout.block
    wide_bytes, words_bytes, _ = plane_bytes(kind, rows, columns)
    wide, words, share = np.split(data, [wide_bytes, wide_bytes + words_bytes])
    shares = share.reshape(groups, -1, WARP, 4).transpose(0, 2, 1, 3)
    parts = (
        wide.reshape(groups, blocks, layout.wide, WARP, 16).transpose(0, 3, 1, 2, 4),
        words.reshape(groups, blocks, layout.words, WARP, 4).transpose(0, 3, 1, 2, 4),
        shares.reshape(groups, WARP, -1)[..., : blocks * layout.share_bytes],
    )
    tiles = np.concatenate([part.reshape(groups * WARP, blocks, -1) for part in parts], axis=-1)
    return permute(tiles[:rows], np.argsort(sources(kind))).reshape(-1)


def from_bf16(data: Bytes) -> tuple[str, Bytes]:
    """BF16 as F16, which tensor cores take; as F32 where F16 would overflow, or is too coarse.

    In F16 a weight is off by at most 2^-25, which is 2^-12 or less of the largest.
    """
    wide = data.view(np.uint16).astype(np.uint32) << 16
    values = wide.view(np.float32)
    largest = np.abs(values).max(initial=0.0)  # NaN if there is any
    if largest == 0 or F16_FINE_MIN <= largest <= F16_MAX:
        return "F16", values.astype(np.float16).view(np.uint8)
    return "F32", values.view(np.uint8)


# --- on the device --------------------------------------------------------------------------------


def repack(source: Array, table: Array, packed: Packed) -> Launch:
    """Repack a matrix that lies on the device as in the file; `table` is `sources(kind)` as u16."""
    return plan("repack", source, table, packed)


def restore(source: Array, table: Array, packed: Packed) -> Launch:
    """The inverse, into `source`; `table` is the inverse permutation."""
    return plan("restore", source, table, packed)


def plan(entry: str, source: Array, table: Array, packed: Packed) -> Launch:
    layout = layout_of(packed.kind, packed.rows, packed.columns)
    blocks = packed.columns // layout.block
    if source.nbytes != packed.rows * blocks * layout.block_bytes:
        raise KernelError(f"source: {source.nbytes} bytes for {packed.kind} of {packed.rows} rows")
    if packed.data.nbytes != packed_bytes(packed.kind, packed.rows, packed.columns):
        raise KernelError(f"packed: {packed.data.nbytes} bytes for {packed.kind}")
    groups = ceil_div(packed.rows, WARP)
    is_repack = entry == "repack"
    return Launch(
        "repack",
        entry,
        (groups, blocks, 1),
        (THREADS, 1, 1),
        (
            reads("source", source) if is_repack else updates("source", source),
            reads("table", table),
            updates("packed", packed.data) if is_repack else reads("packed", packed.data),
            i32("rows", packed.rows),
            i32("block_bytes", layout.block_bytes),
            i32("wide", layout.wide),
            i32("words", layout.words),
            i32("share_bytes", layout.share_bytes),
        ),
        shared_bytes=WARP * pitch(layout),
    )


def pitch(layout: Layout) -> int:
    """Bytes between two rows' blocks in shared memory: an odd number of words, so banks differ."""
    words = ceil_div(layout.block_bytes, 4)
    return 4 * (words | 1)
