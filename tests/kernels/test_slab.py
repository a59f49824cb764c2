"""Goal: slabs hold the halves that the other kernels multiply, and their products make up a matrix.

Method: every type's slabs on the host's machine against the half weights that `skinny` shows for
unit vectors, bit for bit.  The library's GEMM is NumPy's, or a double of cuBLAS that reads memory
as the BLAS standard says: columns first, with leading dimensions.
"""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
from kernel_blocks import random_matrix

from phaseloop.kernels.contract import KernelError, Launch
from phaseloop.kernels.host import ORDERS, HostFault, Memory
from phaseloop.kernels.repack import LAYOUTS
from phaseloop.kernels.skinny import KINDS, skinny
from phaseloop.kernels.slab import (
    Gemm,
    by_slabs,
    entries,
    expand,
    multiply_on_cublas,
    multiply_on_host,
    slab_rows,
)


def half_weights(host, matrix, columns):
    """[N, columns] by `skinny`, whose own tests hold them against gguf."""
    packed = matrix.packed
    found = np.empty((packed.rows, packed.columns), np.float16)
    for first in range(0, columns, 48):
        count = min(48, columns - first)
        x = np.zeros((count, packed.columns), np.float16)
        x[np.arange(count), first + np.arange(count)] = 1
        y = np.empty((count, packed.rows), np.float32)
        host.run(skinny(x, packed, y))
        found[:, first : first + count] = y.T
    return found


def expanded(host, matrix, first, count, **how):
    memory = Memory()
    slab = memory.empty((count, matrix.packed.columns), np.float16)
    host.run(expand(matrix.packed, slab, first, count), memory, **how)
    return slab


@pytest.mark.parametrize("kind", KINDS)
def test_a_slab_holds_the_half_weights(host, kind):
    host.load("slab", entries(kind))
    matrix = random_matrix(kind, 70, 5 if LAYOUTS[kind].block == 32 else 1, seed=6)
    exact = half_weights(host, matrix, matrix.packed.columns)
    for order in ORDERS:
        assert np.array_equal(expanded(host, matrix, 0, 70, order=order), exact)
    assert np.array_equal(expanded(host, matrix, 32, 38), exact[32:])


def test_shared_memory_has_no_bank_conflicts(host):
    matrix = random_matrix("Q4_K", 64, 1)
    slab = np.empty((64, 256), np.float16)
    run = host.run(expand(matrix.packed, slab, 0, 64), counts_banks=True)
    assert run.banks
    for banks in run.banks:
        assert banks.wavefronts == banks.wavefronts_ideal, banks


def perform(host, steps, multiply=multiply_on_host):
    for step in steps:
        if isinstance(step, Launch):
            host.run(step)
        else:
            multiply(step)


def product_case(rows=9):
    matrix = random_matrix("Q5_K", 150, 1)
    x = np.random.default_rng(2).standard_normal((rows, 256)).astype(np.float16)
    exact = x.astype(np.float64) @ matrix.values.astype(np.float64).T
    return matrix, x, exact


@pytest.mark.parametrize("rows", [32, 64, 160])
def test_slabs_make_up_a_product(host, rows):
    matrix, x, exact = product_case()
    slab = np.empty((rows, 256), np.float16)
    y = np.full((9, 150), np.nan, np.float32)
    perform(host, by_slabs(x, matrix.packed, y, slab))
    assert np.linalg.norm(y - exact) <= 1e-3 * np.linalg.norm(exact)
    before = y.copy()
    perform(host, by_slabs(x, matrix.packed, y, slab, adds=True))
    assert np.array_equal(y, before + before)


class Blas:
    """cublasGemmEx on the host's memory, for f16 operands and f32 results, as the standard has it:
    C = alpha op(A) op(B) + beta C, element (i, j) of a matrix at i + j * ld."""

    def gemmEx(self, handle, op_a, op_b, m, n, k, alpha, a, a_type, lda, b, b_type, ldb, beta,
               c, c_type, ldc, compute, algorithm):  # fmt: skip
        assert (handle, a_type, b_type, c_type, compute, algorithm) == (7, 2, 2, 0, 68, -1)
        left = stored(a, np.float16, *((m, k) if op_a == 0 else (k, m)), lda)
        right = stored(b, np.float16, *((k, n) if op_b == 0 else (n, k)), ldb)
        left, right = (left.T if op_a else left), (right.T if op_b else right)
        target = stored(c, np.float32, m, n, ldc)
        scale, keep = (ctypes.c_float.from_address(at).value for at in (alpha, beta))
        old = keep * target if keep else 0  # what is not kept may be a NaN
        target[:] = scale * (left.astype(np.float32) @ right.astype(np.float32)) + old


def stored(at, dtype, rows, columns, leading):
    """A view of memory as a matrix whose columns are `leading` elements apart."""
    assert leading >= rows
    size = np.dtype(dtype).itemsize
    count = (columns - 1) * leading + rows
    flat = np.frombuffer((ctypes.c_char * (count * size)).from_address(at), dtype)
    return np.lib.stride_tricks.as_strided(flat, (rows, columns), (size, leading * size))


class OnDevice:
    """An array as CuPy shows it: `data.ptr` is its address."""

    def __init__(self, array):
        self.array = array
        self.shape, self.dtype = array.shape, array.dtype
        self.data = SimpleNamespace(ptr=array.ctypes.data)


def test_cublas_is_told_the_same_product(host):
    matrix, x, _ = product_case()
    slab = np.empty((64, 256), np.float16)
    expected, y = np.zeros((9, 150), np.float32), np.full((9, 150), np.nan, np.float32)

    def both(gemm):
        multiply_on_host(gemm)
        there = [OnDevice(array) for array in (gemm.x, gemm.w, y)]
        multiply_on_cublas(Gemm(*there, gemm.first, gemm.count, gemm.adds), Blas(), 7)

    for adds in (False, True):
        perform(host, by_slabs(x, matrix.packed, expected, slab, adds=adds), both)
        assert np.allclose(y, expected, rtol=1e-5, atol=1e-4)


FAULTS = {
    "another group": ("first_group + blockIdx.x", "blockIdx.x"),
    "the strip's turn left out": ("mine + staged_at(row, octet)", "mine + staged_at(lane, octet)"),
    "no order between the lanes": ("sync_warp();  // the strip is staged", ""),
    "a row too many": ("group * WARP + row >= N", "false"),
    "columns beyond the last": ("number * STRIP >= K", "false"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(host, plant, fault):
    bad = plant("slab.cu", *FAULTS[fault])
    matrix = random_matrix("Q4_0", 70, 5)
    exact = expanded(host, matrix, 32, 38)
    try:
        slab = expanded(bad, matrix, 32, 38)
    except HostFault as found:
        assert "slab.cu" in str(found) or "quant.cuh" in str(found)
        return
    assert not np.array_equal(slab, exact)


def test_plans():
    matrix, x, _ = product_case()
    y = np.empty((9, 150), np.float32)
    steps = by_slabs(x, matrix.packed, y, np.empty((64, 256), np.float16))
    assert [step.entry for step in steps[::2]] == ["slab<Q5_K>"] * 3
    assert [(step.first, step.count) for step in steps[1::2]] == [(0, 64), (64, 64), (128, 22)]
    assert (slab_rows(4096), slab_rows(5120), slab_rows(1 << 22)) == (512, 384, 32)
    with pytest.raises(KernelError, match="slab: 48 rows; they come in whole groups of 32"):
        by_slabs(x, matrix.packed, y, np.empty((48, 256), np.float16))
    with pytest.raises(KernelError, match=r"slab: weight is \[150, 256\], x and y want \[9, 256\]"):
        by_slabs(x, matrix.packed, np.empty((9, 9), np.float32), np.empty((32, 256), np.float16))
