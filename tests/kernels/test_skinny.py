"""Goal: a few rows times a quantised matrix are right for every type, and the same in any company.

Method: random blocks of odd and even numbers of rows, columns and units, on the host's machine; the
oracle is gguf's dequantisation and a product in float64.  Unit vectors as activations show the half
weights themselves.  Then faults are planted in the source, and each must be noticed.
"""

import numpy as np
import pytest
from kernel_blocks import random_matrix

from phaseloop.kernels.contract import KernelError
from phaseloop.kernels.host import ORDERS, HostFault, Memory
from phaseloop.kernels.repack import LAYOUTS, Packed, packed_bytes
from phaseloop.kernels.skinny import KINDS, entries, skinny

RELATIVE = 1e-3  # half weights: 2^-11 for scale, offset and weight each; their errors add up less
ROWS = (1, 8, 9, 16, 17, 48)
# Types whose half weight is the exact weight rounded once; the others round their scale before.
ROUNDED_ONCE = {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4", "F16"}


def activations(rows, columns, seed=1):
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float16)


def product(host, x, matrix, **how):
    memory = Memory()
    y = memory.empty((len(x), matrix.packed.rows), np.float32)
    host.run(skinny(x, matrix.packed, y), memory, **how)
    return y


def error(y, x, matrix):
    """Relative, in L2; infinite where anything is not finite."""
    exact = x.astype(np.float64) @ matrix.values.astype(np.float64).T
    if not np.isfinite(y).all():
        return np.inf
    return np.linalg.norm(y - exact) / np.linalg.norm(exact)


@pytest.fixture(params=KINDS)
def kind(request, host):
    host.load("skinny", entries(request.param))
    return request.param


def blocks_of(kind):
    """More units than warps, and a last share of several blocks' scales that is not full."""
    return 17 if LAYOUTS[kind].block == 32 else 3


def test_product_and_company(host, kind):
    """Right for any number of rows; a row's bits are the same in all of them, in any order."""
    matrix = random_matrix(kind, 70, blocks_of(kind))
    x = activations(48, matrix.packed.columns)
    before = x.copy(), matrix.packed.data.copy()
    whole = product(host, x, matrix)
    assert error(whole, x, matrix) <= RELATIVE
    for rows in ROWS:
        for order in ORDERS:
            assert np.array_equal(product(host, x[:rows], matrix, order=order), whole[:rows])
    for row in (1, 17, 47):
        assert np.array_equal(product(host, x[row : row + 1], matrix)[0], whole[row])
    assert np.array_equal(before[0], x)
    assert np.array_equal(before[1], matrix.packed.data)


def test_half_weights(host, kind):
    """A unit vector picks a column: its weights are the exact ones, rounded to halves."""
    matrix = random_matrix(kind, 33, 1, seed=2)
    columns = matrix.packed.columns
    exact = matrix.values
    for first in range(0, columns, 48):
        picked = np.arange(first, min(first + 48, columns))
        x = np.zeros((len(picked), columns), np.float16)
        x[np.arange(len(picked)), picked] = 1
        got, wanted = product(host, x, matrix), exact[:, picked].T
        if kind in ROUNDED_ONCE:
            assert np.array_equal(got, wanted.astype(np.float16).astype(np.float32))
        else:
            # Scale, offset and weight each lose half a unit in the last of 11 bits.
            largest = np.abs(exact).max()
            assert np.abs(got - wanted).max() <= 3 * 2.0**-12 * 2 * largest
            assert np.array_equal(got, got.astype(np.float16))


@pytest.mark.parametrize("shape", [(1, 1), (31, 2), (32, 8), (33, 9), (96, 33)])
def test_odd_sizes(host, shape):
    rows, blocks = shape
    for kind in ("Q8_0", "Q4_0"):
        matrix = random_matrix(kind, rows, blocks)
        x = activations(5, matrix.packed.columns)
        assert error(product(host, x, matrix), x, matrix) <= RELATIVE
        x = activations(21, matrix.packed.columns)
        assert error(product(host, x, matrix), x, matrix) <= RELATIVE


@pytest.mark.parametrize("rows", [3, 20])
def test_bias_and_residual_are_added(host, rows):
    matrix = random_matrix("Q4_K", 45, 1)
    x = activations(rows, 256)
    rng = np.random.default_rng(3)
    bias, residual = (rng.standard_normal(s).astype(np.float32) for s in ((45,), (rows, 45)))
    plain = product(host, x, matrix)
    y = residual.copy()
    host.run(skinny(x, matrix.packed, y, bias=bias, residual=y))
    assert np.array_equal(y, plain + bias + residual)
    other = np.empty_like(y)
    host.run(skinny(x, matrix.packed, other, residual=residual))
    assert np.array_equal(other, plain + residual)


@pytest.mark.parametrize("shape", [(1, 5, 1), (8, 32, 4), (9, 70, 17)])
def test_f32(host, shape):
    rows, columns, blocks = shape
    matrix = random_matrix("F32", columns, blocks)
    x = np.random.default_rng(4).standard_normal((rows, 32 * blocks)).astype(np.float32)
    y = product(host, x, matrix)
    assert error(y, x, matrix) <= 1e-6
    assert np.array_equal(product(host, x[-1:], matrix, order="shuffled")[0], y[-1])


@pytest.mark.parametrize("rows", [8, 16, 32, 48])
def test_shared_memory_has_no_bank_conflicts(host, rows):
    matrix = random_matrix("Q4_K", 64, 2)
    y = np.empty((rows, 64), np.float32)
    run = host.run(skinny(activations(rows, 512), matrix.packed, y), counts_banks=True)
    assert run.banks
    for banks in run.banks:
        assert banks.wavefronts == banks.wavefronts_ideal, banks


# --- planted faults -------------------------------------------------------------------------------

FAULTS = {
    "no barrier before the sums": (
        "skinny.cu", "sync_block();  // all warps' sums are there\n    const int n", "const int n",
    ),
    "no barrier before a buffer is overwritten": (
        "skinny.cu", "sync_block();  // this strip is staged, and", "//",
    ),
    "one bit of the accumulator's map": ("skinny.cu", "+ (lane & 2);", "+ (lane & 1);"),
    "one bit of an operand's map": (
        "skinny.cu", "(lane & 3) + (lane >= 16 ? 4 : 0); }", "(lane & 3) + (lane >= 8 ? 4 : 0); }",
    ),
    "scales of neighbours swapped": ("quant.cuh", "header, unit % 8)", "header, unit % 8 ^ 1)"),
    "scale and offset swapped": (
        "quant.cuh", "(scales >> shift & 0xff) | (offsets >> shift & 0xff) << 16",
        "(offsets >> shift & 0xff) | (scales >> shift & 0xff) << 16",
    ),
    "a unit beyond the last": ("skinny.cu", "if (unit + K_WARPS < units) next", "next"),
    "a warp's units one off": ("skinny.cu", "planes, unit + K_WARPS)", "planes, unit + 1)"),
    "a warp's sum left out": ("skinny.cu", "warp < K_WARPS; ++warp) sum", "warp < 7; ++warp) sum"),
    "a row too many": ("skinny.cu", "if (m < M && n < N) {\n            finish(partial + m",
                       "if (n < N) {\n            finish(partial + m"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(plant, fault):
    """By the machine, by the oracle, or by orders that differ."""
    host = plant(*FAULTS[fault])
    matrix = random_matrix("Q4_K", 70, 3)
    x = activations(20 if "buffer" in fault else 5, 768)
    try:
        y = product(host, x, matrix)
    except HostFault as found:
        assert "skinny.cu" in str(found) or "quant.cuh" in str(found)
        return
    assert not error(y, x, matrix) <= 10 * RELATIVE


# --- plans ----------------------------------------------------------------------------------------


def plan(rows, kind="Q4_K", columns=4096, inner=4096):
    weight = Packed(kind, columns, inner, np.empty(packed_bytes(kind, columns, inner), np.uint8))
    y = np.empty((rows, columns), np.float32)
    return skinny(np.empty((rows, inner), np.float16), weight, y)


def test_the_mapping_depends_on_rows_by_tiles_alone():
    told = [(p.entry, p.grid[0], p.block[0]) for p in map(plan, (1, 8, 9, 16, 17, 32, 33, 48))]
    assert told == [
        ("skinny<Q4_K, 1>", 128, 256),
        ("skinny<Q4_K, 1>", 128, 256),
        ("skinny<Q4_K, 2>", 128, 256),
        ("skinny<Q4_K, 2>", 128, 256),
        ("skinny_staged<Q4_K, 4>", 64, 512),
        ("skinny_staged<Q4_K, 4>", 64, 512),
        ("skinny_staged<Q4_K, 6>", 64, 512),
        ("skinny_staged<Q4_K, 6>", 64, 512),
    ]


def test_what_it_cannot_take_is_refused():
    with pytest.raises(KernelError, match="49 rows; it takes 1 to 48"):
        plan(49)
    with pytest.raises(KernelError, match="no kernel for IQ2_S"):
        skinny(
            np.empty((1, 256), np.float16),
            Packed("IQ2_S", 32, 256, np.empty(0, np.uint8)),
            np.empty((1, 32), np.float32),
        )
    weight = Packed("Q4_K", 32, 256, np.empty(packed_bytes("Q4_K", 32, 256), np.uint8))
    with pytest.raises(KernelError, match=r"weight is \[32, 256\], x and y want \[32, 512\]"):
        skinny(np.empty((1, 512), np.float16), weight, np.empty((1, 32), np.float32))
    with pytest.raises(KernelError, match="x: expected f16 M K, got float32"):
        skinny(np.empty((1, 256), np.float32), weight, np.empty((1, 32), np.float32))
    with pytest.raises(KernelError, match="bias: N is 32 elsewhere, 31 here"):
        skinny(
            np.empty((1, 256), np.float16),
            weight,
            np.empty((1, 32), np.float32),
            bias=np.empty(31, np.float32),
        )
