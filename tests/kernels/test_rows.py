"""Goal: rows are taken, added and converted as NumPy does it, at every edge of a block.

Method: random rows on the host's machine, some sizes a block's own and some beyond it.
"""

import numpy as np
import pytest

from phaseloop.kernels.contract import KernelError, planned
from phaseloop.kernels.host import ORDERS, Memory
from phaseloop.kernels.rows import add, narrow, take, widen


def halves(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float16)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("columns", [8, 1024, 2056])
def test_rows_are_taken_in_any_order_and_more_than_once(host, columns, dtype):
    x = halves(7, columns).astype(dtype)
    rows = np.array([6, 0, 3, 3], np.int32)
    for order in ORDERS:
        memory = Memory()
        y = memory.empty((4, columns), dtype)
        host.run(take(x, rows, y), memory, order=order)
        assert np.array_equal(y, x[rows])


@pytest.mark.parametrize("shape", [(1, 4), (3, 1024), (2, 1028)])
def test_sums_and_conversions(host, shape):
    memory = Memory()
    a, b = (halves(*shape, seed=seed).astype(np.float32) * 1.001 for seed in (1, 2))
    a = a.astype(np.float32)
    b = b.astype(np.float32)
    total, half, full = (memory.empty(shape, kind) for kind in (np.float32, np.float16, np.float32))
    host.run(add(a, b, total), memory)
    host.run(narrow(a, half), memory)
    host.run(widen(half, full), memory)
    assert np.array_equal(total, a + b)
    assert np.array_equal(half, a.astype(np.float16))
    assert np.array_equal(full, half.astype(np.float32))


def test_what_does_not_fit_is_refused():
    x, y = planned("f32", 4, 8), planned("f32", 2, 8)
    with pytest.raises(KernelError, match="take"):
        take(x, planned("i32", 3), y)
    with pytest.raises(KernelError, match="whole 16s"):
        take(planned("f32", 4, 6), planned("i32", 2), planned("f32", 2, 6))
    with pytest.raises(KernelError, match="b is float32"):
        add(y, x, y)
    with pytest.raises(KernelError, match="multiple of 4"):
        narrow(planned("f32", 1, 6), planned("f16", 1, 6))
    with pytest.raises(KernelError, match="x is float32"):
        widen(y, planned("f32", 2, 8))
