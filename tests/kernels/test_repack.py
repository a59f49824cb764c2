"""Goal: repacked matrices hold the file's bits, all of them, where the kernels look for them.

Method: random bytes there and back, by NumPy and by the kernels on the host's machine, which must
agree to the byte.  What a place means is checked by the kernels that read it: the rows of `gather`
equal gguf's own dequantisation bit for bit.
"""

import numpy as np
import pytest
from kernel_blocks import random_matrix

from phaseloop.kernels import repack
from phaseloop.kernels.contract import KernelError
from phaseloop.kernels.gather import gather
from phaseloop.kernels.host import ORDERS, Memory
from phaseloop.kernels.repack import LAYOUTS, Packed, from_bf16, pack, packed_bytes, unpack

KINDS = list(LAYOUTS)
SHAPES = ((1, 1), (33, 3), (64, 2), (40, 5))  # rows, blocks per row


def random_bytes(kind, rows, blocks):
    count = rows * blocks * LAYOUTS[kind].block_bytes
    return np.random.default_rng(rows).integers(0, 256, count, dtype=np.uint8)


def empty_packed(kind, rows, blocks, memory):
    columns = blocks * LAYOUTS[kind].block
    data = memory.empty((packed_bytes(kind, rows, columns),), np.uint8)
    return Packed(kind, rows, columns, data)


@pytest.mark.parametrize("kind", KINDS)
def test_the_planes_are_as_large_as_the_blocks(kind):
    layout = LAYOUTS[kind]
    assert 16 * layout.wide + 4 * layout.words + layout.share_bytes == layout.block_bytes
    columns = 8 * layout.block
    assert packed_bytes(kind, 64, columns) == 64 * 8 * layout.block_bytes
    tail = 4 - layout.share_bytes if layout.share_bytes else 0
    assert packed_bytes(kind, 64, layout.block) <= 64 * (layout.block_bytes + tail)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back_by_numpy(kind, shape):
    rows, blocks = shape
    data = random_bytes(kind, rows, blocks)
    columns = blocks * LAYOUTS[kind].block
    packed = pack(kind, rows, columns, data)
    assert packed.size == packed_bytes(kind, rows, columns)
    assert np.array_equal(unpack(kind, rows, columns, packed), data)


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernels_repack_and_restore_the_same_bytes(host, kind):
    order = repack.sources(kind)
    table, inverse = order.astype(np.uint16), np.argsort(order).astype(np.uint16)
    for (rows, blocks), how in zip(SHAPES, (*ORDERS, "forward"), strict=True):
        data, memory = random_bytes(kind, rows, blocks), Memory()
        packed = empty_packed(kind, rows, blocks, memory)
        host.run(repack.repack(data, table, packed), memory, order=how)
        assert np.array_equal(packed.data, pack(kind, rows, packed.columns, data))
        back = memory.empty(data.shape, np.uint8)
        host.run(repack.restore(back, inverse, packed), memory, order=how)
        assert np.array_equal(back, data)


@pytest.mark.parametrize("kind", KINDS)
def test_gathered_rows_are_ggufs_dequantisation_to_the_bit(host, kind):
    matrix = random_matrix(kind, 70, 5 if LAYOUTS[kind].block == 32 else 2, seed=5)
    tokens = np.array([0, 69, 31, 32, 33, 0], np.int32)
    for order in ORDERS:
        memory = Memory()
        y = memory.empty((6, matrix.packed.columns), np.float32)
        host.run(gather(tokens, matrix.packed, y), memory, order=order)
        assert np.array_equal(y, matrix.values[tokens])


def test_an_embedding_may_be_scaled(host):
    matrix = random_matrix("Q8_0", 4, 2)
    y = np.empty((2, 64), np.float32)
    host.run(gather(np.array([3, 1], np.int32), matrix.packed, y, scale=0.1))
    assert np.array_equal(y, matrix.values[[3, 1]] * np.float32(0.1))


def test_one_wrong_bit_of_the_order_is_noticed(host):
    """The oracle can fail: two neighbouring bits swapped give other values."""
    matrix = random_matrix("Q4_K", 32, 1)
    order = repack.sources("Q4_K").copy()
    order[[5, 6]] = order[[6, 5]]
    data = np.zeros_like(matrix.packed.data)
    packed = Packed("Q4_K", 32, 256, data)
    host.run(repack.repack(matrix.data, order.astype(np.uint16), packed))
    y = np.empty((32, 256), np.float32)
    host.run(gather(np.arange(32, dtype=np.int32), packed, y))
    assert 0 < np.count_nonzero(y != matrix.values) <= 32


def test_bf16_becomes_f16_unless_it_overflows():
    values = np.array([0.0, -1.5, 65504.0, 3.0e-5], np.float32)
    bf16 = (values.view(np.uint32) >> 16).astype(np.uint16)
    held = (bf16.astype(np.uint32) << 16).view(np.float32)
    kind, data = from_bf16(bf16.view(np.uint8))
    assert kind == "F16"
    assert np.array_equal(data.view(np.float16).astype(np.float32), held.astype(np.float16))
    for large in (1.0e6, np.inf, np.nan):
        values[0] = large
        bf16 = (values.view(np.uint32) >> 16).astype(np.uint16)
        kind, data = from_bf16(bf16.view(np.uint8))
        assert kind == "F32"
        held = (bf16.astype(np.uint32) << 16).view(np.float32)
        assert np.array_equal(data.view(np.float32), held, equal_nan=True)


@pytest.mark.parametrize(
    ("kind", "rows", "columns", "words"),
    [
        ("IQ1_S", 32, 256, "type IQ1_S has no kernels; there are F16"),
        ("Q4_K", 32, 288, "columns must be whole blocks of 256"),
        ("Q4_K", 0, 256, "columns must be"),
        ("F32", 1 << 20, 1 << 14, "more pieces than 32-bit indices count"),
    ],
)
def test_what_kernels_cannot_take_is_refused(kind, rows, columns, words):
    with pytest.raises(KernelError, match=words):
        packed_bytes(kind, rows, columns)


def test_a_buffer_of_another_size_is_refused():
    packed = Packed("Q8_0", 32, 64, np.empty(32 * 68, np.uint8))
    table = np.empty(8 * 34, np.uint16)
    with pytest.raises(KernelError, match="source: 100 bytes for Q8_0 of 32 rows"):
        repack.repack(np.empty(100, np.uint8), table, packed)
    with pytest.raises(KernelError, match="packed: 2175 bytes for Q8_0"):
        repack.repack(
            np.empty(32 * 68, np.uint8), table, Packed("Q8_0", 32, 64, np.empty(2175, np.uint8))
        )
