"""A kernel call as data: planned and checked once, performed or captured many times.

A family's module (skinny.py for cuda/skinny.cu) checks its operands with `dims` and returns a
`Launch`.  It neither allocates nor launches, so plans can be tested, counted and printed anywhere.
"""

import math
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from msgspec import Struct

WARP = 32
SHARED_BYTES_MAX = 96 << 10  # of a block on Volta; above 48 KiB the loader asks the driver for it
DTYPES = {
    "f16": np.dtype(np.float16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "i8": np.dtype(np.int8),
    "u8": np.dtype(np.uint8),
    "i32": np.dtype(np.int32),
    "u32": np.dtype(np.uint32),
    "u64": np.dtype(np.uint64),
}


class KernelError(Exception):
    """A kernel that cannot be planned, built or run; says what, where and the remedy."""


class Array(Protocol):
    """What numpy.ndarray and cupy.ndarray have in common, as far as plans look."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> "np.dtype[Any]": ...
    @property
    def strides(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...


class Planned(Struct, frozen=True):
    """An array that nobody has allocated: enough to plan with, and to count bytes."""

    shape: tuple[int, ...]
    dtype: "np.dtype[Any]"

    @property
    def strides(self) -> tuple[int, ...]:
        behind = (math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))
        return tuple(self.dtype.itemsize * count for count in behind)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def planned(kind: str, *shape: int) -> Planned:
    """`planned("f16", rows, K)`, with the names of types that `dims` takes."""
    return Planned(shape, DTYPES[kind])


Access: TypeAlias = Literal["read", "write", "update"]
Scalar: TypeAlias = np.int32 | np.uint32 | np.uint64 | np.float32


class Operand(Struct, frozen=True):
    """An array parameter.  `write` promises that the kernel reads no byte it has not written."""

    name: str
    array: Array | None  # None: a null pointer, where the kernel allows it
    access: Access


class Parameter(Struct, frozen=True):
    """A value parameter; its type is the kernel's, so that no float arrives as a double."""

    name: str
    value: Scalar


class Launch(Struct, frozen=True):
    """One kernel on one grid.  `block` counts threads, whole warps of them."""

    source: str  # cuda/<source>.cu
    entry: str  # a template instance: "skinny<Q4_K, 1>"
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    arguments: tuple[Operand | Parameter, ...]
    shared_bytes: int = 0  # dynamic, beside what the kernel declares


def reads(name: str, array: Array | None) -> Operand:
    return Operand(name, array, "read")


def writes(name: str, array: Array | None) -> Operand:
    return Operand(name, array, "write")


def updates(name: str, array: Array) -> Operand:
    return Operand(name, array, "update")


def i32(name: str, value: int) -> Parameter:
    return Parameter(name, np.int32(value))


def f32(name: str, value: float) -> Parameter:
    return Parameter(name, np.float32(value))


def traffic_bytes(launch: Launch) -> int:
    """What the launch must move at least: each operand once, twice where it is updated."""
    total = 0
    for argument in launch.arguments:
        if isinstance(argument, Operand) and argument.array is not None:
            total += argument.array.nbytes * (2 if argument.access == "update" else 1)
    return total


def dims(**operands: tuple[Array, str]) -> dict[str, int]:
    """Bind symbolic sizes: `dims(x=(x, "f16 rows K"), y=(y, "f32 rows N"))` -> {"rows": 4, ...}.

    A size may also be a number.  Raises KernelError unless every operand has its type and rank, is
    C-contiguous, and agrees with the others on the sizes they share.
    """
    bound: dict[str, int] = {}
    for name, (array, spec) in operands.items():
        kind, *symbols = spec.split()
        if array.dtype != DTYPES[kind] or len(array.shape) != len(symbols):
            raise KernelError(f"{name}: expected {spec}, got {array.dtype} {array.shape}")
        for symbol, size in zip(symbols, array.shape, strict=True):
            expected = int(symbol) if symbol.isdecimal() else bound.setdefault(symbol, size)
            if expected != size:
                raise KernelError(f"{name}: {symbol} is {expected} elsewhere, {size} here")
        check_contiguous(name, array)
    return bound


def check_contiguous(name: str, array: Array) -> None:
    stride = array.dtype.itemsize
    for size, actual in zip(reversed(array.shape), reversed(array.strides), strict=True):
        if size > 1 and actual != stride:
            raise KernelError(f"{name}: must be C-contiguous, has strides {array.strides}")
        stride *= size


def ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)
