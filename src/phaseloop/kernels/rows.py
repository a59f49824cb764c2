"""rows: wrapper of cuda/rows.cu, where shapes, numerics, mapping and roofline are stated."""

import math

from .contract import (
    Array,
    KernelError,
    Launch,
    Operand,
    ceil_div,
    check_contiguous,
    dims,
    i32,
    reads,
    writes,
)

THREADS = 256
PACK = 4  # elements of a thread
WORD = 16  # bytes
GRID_MAX = 65535  # of y
COUNT_MAX = 1 << 31


def take(x: Array, rows: Array, y: Array) -> Launch:
    """y[i] = x[rows[i]].  x [T, K], y [O, K] of one type; rows i32 [O], all below T.

    Who calls checks the rows: the kernel reads whatever row it is told.
    """
    count = dims(rows=(rows, "i32 O"))["O"]
    for name, array in (("x", x), ("y", y)):
        check_contiguous(name, array)
    row_bytes = y.nbytes // max(1, count)
    if x.dtype != y.dtype or x.shape[1:] != y.shape[1:] or y.shape[0] != count:
        raise KernelError(f"take: {count} rows of x {x.dtype} {x.shape} to {y.dtype} {y.shape}")
    if row_bytes % WORD or count > GRID_MAX:
        raise KernelError(f"take: {count} rows of {row_bytes} bytes; it takes whole {WORD}s")
    return Launch(
        "rows",
        "take",
        (ceil_div(row_bytes // WORD, THREADS), count, 1),
        (THREADS, 1, 1),
        (reads("x", x), reads("rows", rows), writes("y", y), i32("words", row_bytes // WORD)),
    )


def add(a: Array, b: Array, y: Array) -> Launch:
    """y = a + b, f32 in one shape."""
    return elementwise("add", y, "float32", (reads("a", a), reads("b", b)), "float32")


def narrow(x: Array, y: Array) -> Launch:
    """y f16 = x f32."""
    return elementwise("narrow", y, "float16", (reads("x", x),), "float32")


def widen(x: Array, y: Array) -> Launch:
    """y f32 = x f16."""
    return elementwise("widen", y, "float32", (reads("x", x),), "float16")


def elementwise(
    entry: str, y: Array, kind: str, operands: tuple[Operand, ...], kind_in: str
) -> Launch:
    count = math.prod(y.shape)
    inputs = [(one.name, one.array, kind_in) for one in operands if one.array is not None]
    for name, array, expected in (*inputs, ("y", y, kind)):
        check_contiguous(name, array)
        if array.dtype != expected or array.shape != y.shape:
            raise KernelError(f"{entry}: {name} is {array.dtype} {array.shape}, y {y.shape}")
    if count % PACK or not 0 < count < COUNT_MAX:
        raise KernelError(f"{entry}: {count} elements; it takes a multiple of {PACK} below 2^31")
    return Launch(
        "rows",
        entry,
        (ceil_div(count, THREADS * PACK), 1, 1),
        (THREADS, 1, 1),
        (*operands, writes("y", y), i32("count", count)),
    )


def entries() -> list[str]:
    return ["take", "add", "narrow", "widen"]
