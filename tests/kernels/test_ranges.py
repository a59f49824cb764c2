"""Goal: a weight that kernels cannot hold is refused by its tensor's name and its place.

Method: one block of a sound random matrix of each type is spoiled: infinite scales, NaN, scales so
large that weights leave what halves hold; then the limit is checked from both sides, with weights
that gguf's dequantisation says the block really has.  What passes is a half in the kernels.
"""

import re

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from kernel_blocks import SCALES as PLACES
from kernel_blocks import random_matrix

from phaseloop.kernels import ranges
from phaseloop.kernels.contract import KernelError
from phaseloop.kernels.host import Memory
from phaseloop.kernels.ranges import SCALES, check_values
from phaseloop.kernels.repack import LAYOUTS, Packed, from_bf16, pack
from phaseloop.kernels.skinny import skinny

NAME = "blk.7.ffn_up.weight"


def blocks_of(kind, rows=3, blocks=2):
    """-> writable [rows * blocks, block_bytes], and columns."""
    matrix = random_matrix(kind, rows, blocks)
    return matrix.data.reshape(-1, LAYOUTS[kind].block_bytes).copy(), matrix.packed.columns


def check(kind, blocks, columns):
    check_values(NAME, kind, columns, blocks.reshape(-1))


def put(blocks, block, byte, value):
    with np.errstate(over="ignore"):
        blocks[block, byte : byte + 2] = np.array([value], np.float16).view(np.uint8)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_sound_matrix_passes(kind):
    check(kind, *blocks_of(kind))
    blocks, columns = blocks_of(kind)
    blocks[:] = 0
    check(kind, blocks, columns)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("kind", SCALES)
def test_a_scale_that_is_no_number_is_refused(kind, value):
    assert {scale.byte for scale in SCALES[kind]} == set(PLACES[kind])
    for scale in SCALES[kind]:
        blocks, columns = blocks_of(kind)
        put(blocks, 3, scale.byte, value)
        where = f"{NAME}: row 1, column {columns // 2}: the scale of its {kind} block is not a"
        with pytest.raises(KernelError, match=re.escape(where)):
            check(kind, blocks, columns)


@pytest.mark.parametrize("kind", SCALES)
def test_the_reach_is_what_a_block_can_hold(kind):
    """No weight of many random blocks exceeds it, and one comes near."""
    matrix = random_matrix(kind, 64, 8, seed=9)
    blocks = matrix.data.reshape(-1, LAYOUTS[kind].block_bytes)
    largest = np.abs(matrix.values).reshape(len(blocks), -1).max(axis=1)
    reaches = ranges.scale_reaches(kind, blocks)
    assert (largest <= reaches * (1 + 1e-6)).all()
    assert (largest / reaches).max() >= 0.5


@pytest.mark.parametrize("kind", SCALES)
def test_a_scale_too_large_is_refused_and_one_that_fits_is_not(kind):
    first = SCALES[kind][0]
    for byte in PLACES[kind]:
        blocks, columns = blocks_of(kind)
        for other in PLACES[kind]:
            blocks[5, other : other + 2] = 0
        if byte != first.byte:
            continue
        put(blocks, 5, byte, 64000 / first.reach)
        check(kind, blocks, columns)
        put(blocks, 5, byte, min(70000 / first.reach, 65504) * 1.01)
        if first.reach > 1:
            with pytest.raises(KernelError, match=rf"row 2, column {columns // 2}: its {kind}"):
                check(kind, blocks, columns)


def mxfp4(exponent, code, rest=0):
    """One block of 32: its exponent, one code, and the others."""
    block = np.full(17, rest * 0x11, np.uint8)
    block[0], block[5] = exponent, (rest << 4) | code
    return block[None]


@pytest.mark.parametrize(
    ("exponent", "code", "is_held"),
    [
        (140, 7, True),  # 6 * 2^13
        (141, 7, False),  # 6 * 2^14 = 98304
        (141, 6, False),  # 4 * 2^14 = 65536
        (141, 5, True),  # 3 * 2^14
        (142, 13, False),  # -3 * 2^15
        (142, 1, True),  # 2^14
        (142, 0, True),
        (127, 3, True),
    ],
)
def test_exponents_of_mxfp4(exponent, code, is_held):
    block = mxfp4(exponent, code)
    value = np.abs(dequantize(block, GGMLQuantizationType.MXFP4)).max()
    assert is_held == (value <= 65504)
    if is_held:
        check_values(NAME, "MXFP4", 32, block.reshape(-1))
        return
    words = f"{NAME}: row 0, column 0: its MXFP4 block reaches {value:.6g}, and kernels hold"
    with pytest.raises(KernelError, match=re.escape(words)):
        check_values(NAME, "MXFP4", 32, block.reshape(-1))


def test_what_passes_is_a_half_in_the_kernels(host):
    """3 * 2^14, and a block of zeros beside it whose scale is the largest there is."""
    with pytest.raises(KernelError, match="column 0: its MXFP4 block reaches 65536"):
        check_values(NAME, "MXFP4", 32, mxfp4(143, 8).reshape(-1))
    data = np.concatenate([mxfp4(141, 5), mxfp4(142, 8)]).reshape(-1)
    check_values(NAME, "MXFP4", 64, data)
    packed = Packed("MXFP4", 1, 64, pack("MXFP4", 1, 64, data))
    y = Memory().empty((1, 1), np.float32)
    host.run(skinny(np.ones((1, 64), np.float16), packed, y))
    assert y[0, 0] == 3 * 2**14


def test_a_matrix_of_tiny_mxfp4_is_refused():
    small, large = mxfp4(100, 7), mxfp4(127, 2)
    with pytest.raises(KernelError, match=f"{NAME}: its largest weight is 4.47e-08; kernels"):
        check_values(NAME, "MXFP4", 32, small.reshape(-1))
    check_values(NAME, "MXFP4", 32, np.concatenate([small, large]).reshape(-1))


def test_an_exponent_that_is_no_number_is_refused():
    with pytest.raises(KernelError, match="the scale of its MXFP4 block is not a finite number"):
        check_values(NAME, "MXFP4", 32, mxfp4(255, 0).reshape(-1))


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_an_element_that_is_no_number_is_refused(kind, value):
    values = np.random.default_rng(1).standard_normal((4, 64)).astype(np.float32)
    values[0, 0], values[1, 3] = 65504.0, -65504.0
    values[2, 7] = value
    words = f"{NAME}: row 2, column 7: the weight is NaN or infinite"
    with pytest.raises(KernelError, match=words):
        check_values(NAME, kind, 64, elements(kind, values))
    values[2, 7] = 0
    check_values(NAME, kind, 64, elements(kind, values))


def elements(kind, values):
    if kind == "BF16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(-1)
    dtype = {"F32": np.float32, "F16": np.float16}[kind]
    return values.astype(dtype).view(np.uint8).reshape(-1)


def test_bf16_that_f16_would_blur_becomes_f32():
    for largest, kind in ((2.0**-13, "F16"), (2.0**-14, "F32"), (0.0, "F16"), (1e-30, "F32")):
        values = np.array([[largest, 0, -largest / 2, 0]], np.float32)
        found, data = from_bf16(elements("BF16", values))
        assert found == kind
        if kind == "F32":
            held = (values.view(np.uint32) >> 16 << 16).view(np.float32)
            assert np.array_equal(data.view(np.float32), held[0])


def test_the_place_is_right_beyond_the_first_chunk(monkeypatch):
    monkeypatch.setattr(ranges, "CHUNK_BYTES", 100)
    blocks, columns = blocks_of("Q8_0", rows=20, blocks=3)
    put(blocks, 50, 0, np.nan)
    with pytest.raises(KernelError, match="row 16, column 64: the scale"):
        check("Q8_0", blocks, columns)
