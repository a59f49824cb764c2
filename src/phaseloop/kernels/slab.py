"""slab: wrapper of cuda/slab.cu, where shapes, numerics, mapping and roofline are stated.

The other way to multiply a prompt: expand a slab of the matrix to halves, let a library's GEMM
multiply it, and go on to the next slab in the same memory.  It is the baseline that `prefill` has
to beat on a device.  How a library orders its sums is its own affair and may depend on the number
of rows, so what is promised of a row's bits does not hold here.
"""

from typing import Any, TypeAlias

import numpy as np
from msgspec import Struct

from .contract import WARP, Array, KernelError, Launch, ceil_div, dims, i32, reads, writes
from .repack import Packed
from .skinny import KINDS

WARPS = 4
THREADS = WARPS * WARP
STRIP = 32
SLAB_BYTES = 4 << 20  # two thirds of a V100's L2: the GEMM finds there what was expanded
# Of cuBLAS's enumerations: operations, types, sums in f32, the algorithm that it chooses itself.
PLAIN, TRANSPOSED, F32, F16, SUMS_F32, DEFAULT = 0, 1, 0, 2, 68, -1


class Gemm(Struct, frozen=True):
    """y[:, first : first + count] = x . w[:count]^T, or += where it adds.  A library's work."""

    x: Array  # f16 [M, K]
    w: Array  # f16 [R, K], R >= count
    y: Array  # f32 [M, N]
    first: int
    count: int
    adds: bool


Step: TypeAlias = Launch | Gemm
Library: TypeAlias = Any  # CuPy's modules and arrays, and NumPy's: they have no types here


def slab_rows(columns: int) -> int:
    """How many rows a slab should have of a matrix with so many columns: whole groups."""
    return max(1, SLAB_BYTES // (2 * columns * WARP)) * WARP


def by_slabs(
    x: Array, weight: Packed, y: Array, slab: Array, *, adds: bool = False
) -> tuple[Step, ...]:
    """y = x . weight^T, or += where it adds.  x f16 [M, K], y f32 [M, N]; slab f16 [R, K], 32 | R.

    The steps follow each other in one queue, since all slabs lie in the same memory.
    """
    d = dims(x=(x, "f16 M K"), y=(y, "f32 M N"), slab=(slab, "f16 R K"))
    if weight.kind not in KINDS:
        raise KernelError(f"slab: no kernel for {weight.kind}, only for {', '.join(KINDS)}")
    if (weight.rows, weight.columns) != (d["N"], d["K"]):
        raise KernelError(
            f"slab: weight is [{weight.rows}, {weight.columns}], x and y want [{d['N']}, {d['K']}]"
        )
    if d["R"] % WARP or d["R"] == 0:
        raise KernelError(f"slab: {d['R']} rows; they come in whole groups of {WARP}")
    steps: list[Step] = []
    for first in range(0, d["N"], d["R"]):
        count = min(d["R"], d["N"] - first)
        steps += [expand(weight, slab, first, count), Gemm(x, slab, y, first, count, adds)]
    return tuple(steps)


def expand(weight: Packed, slab: Array, first: int, count: int) -> Launch:
    """Rows [first, first + count) of a matrix; `first` is that of a group."""
    return Launch(
        "slab",
        f"slab<{weight.kind}>",
        (ceil_div(count, WARP), ceil_div(weight.columns, STRIP * WARPS), 1),
        (THREADS, 1, 1),
        (
            reads("weight", weight.data),
            writes("s", slab),
            i32("first_group", first // WARP),
            i32("N", weight.rows),
            i32("K", weight.columns),
        ),
    )


def entries(kind: str) -> list[str]:
    return [f"slab<{kind}>"]


def multiply_on_host(gemm: Gemm) -> None:
    """By NumPy, on its arrays; products and sums in f32."""
    x, w, y = arrays_of(gemm)
    product = x.astype(np.float32) @ w[: gemm.count].astype(np.float32).T
    target = y[:, gemm.first : gemm.first + gemm.count]
    target[:] = target + product if gemm.adds else product


def multiply_on_cublas(gemm: Gemm, cublas: Library, handle: int) -> None:
    """By cuBLAS, on arrays of the device that `handle` is bound to; `cublas` is CuPy's module.

    cuBLAS counts columns first: to it y is [N, M], w is [K, R] and x is [K, M], and it computes
    y = w^T . x.
    """
    x, w, y = arrays_of(gemm)
    rows, columns = x.shape
    one, beta = np.array(1, np.float32), np.array(gemm.adds, np.float32)
    cublas.gemmEx(
        handle, TRANSPOSED, PLAIN, gemm.count, rows, columns,
        one.ctypes.data, w.data.ptr, F16, columns, x.data.ptr, F16, columns,
        beta.ctypes.data, y.data.ptr + 4 * gemm.first, F32, y.shape[1],
        SUMS_F32, DEFAULT,
    )  # fmt: skip


def arrays_of(gemm: Gemm) -> tuple[Library, Library, Library]:
    return gemm.x, gemm.w, gemm.y
