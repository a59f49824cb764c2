"""Runs launches on the CPU: each CUDA thread a fibre, every access to memory checked.

For tests, and for machines without a GPU.  What is checked, and how: cuda/host/simt.hpp.
"""

import bisect
import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from msgspec import Struct
from numpy.typing import DTypeLike, NDArray

from .contract import KernelError, Launch, Operand
from .host_build import host_library
from .sources import source_directory

Order: TypeAlias = Literal["forward", "reverse", "shuffled"]
ORDERS: tuple[Order, ...] = ("forward", "reverse", "shuffled")
BANK_COUNTS = 64  # lines of a kernel whose bank conflicts are told apart


class HostFault(KernelError):
    """A kernel did what it must not: its line, block and thread, and what it was."""


class Region(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("begin", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("written", ctypes.c_void_p),
        ("is_writable", ctypes.c_uint32),
    )


class Request(ctypes.Structure):
    _fields_ = (
        ("kernel", ctypes.c_char_p),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("region_count", ctypes.c_uint32),
        ("regions", ctypes.POINTER(Region)),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("order", ctypes.c_uint32),
        ("seed", ctypes.c_uint32),
        ("worker_count", ctypes.c_uint32),
        ("counts_banks", ctypes.c_uint32),
    )


class BankCount(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("line", ctypes.c_uint64),
        ("accesses", ctypes.c_uint64),
        ("wavefronts", ctypes.c_uint64),
        ("wavefronts_ideal", ctypes.c_uint64),
    )


class Report(ctypes.Structure):
    _fields_ = (
        ("fault", ctypes.c_char * 1024),
        ("collectives", ctypes.c_uint64),
        ("barriers", ctypes.c_uint64),
        ("bank_count_count", ctypes.c_uint64),
        ("bank_counts", BankCount * BANK_COUNTS),
    )


class Banks(Struct, frozen=True):
    """The shared memory accesses of one line, each by a whole warp.

    A conflict makes an access take more wavefronts than its size needs.
    """

    line: str  # "skinny.cu:120"
    accesses: int
    wavefronts: int
    wavefronts_ideal: int


class Run(Struct, frozen=True):
    collectives: int  # of warps: shuffles, votes, mma
    barriers: int  # of blocks
    banks: tuple[Banks, ...]  # empty unless asked for


class Memory:
    """Arrays of which the machine knows the bytes that something wrote; it keeps them alive.

    Any other array counts as written throughout.
    """

    def __init__(self) -> None:
        self._begins: list[int] = []  # addresses, ascending
        self._arrays: dict[int, tuple[NDArray[Any], NDArray[np.uint8]]] = {}  # with their marks

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Bytes of 0xff (a NaN, in floats), which no kernel may read before one wrote them."""
        array = np.empty(shape, dtype)
        array.view(np.uint8).reshape(-1)[:] = 0xFF
        begin = array.ctypes.data
        self._arrays[begin] = (array, np.zeros(array.nbytes, np.uint8))
        bisect.insort(self._begins, begin)
        return array

    def forget(self, array: NDArray[Any]) -> None:
        """Let go of an array of `empty`."""
        begin = array.ctypes.data
        del self._arrays[begin]
        self._begins.remove(begin)

    def marks(self, array: NDArray[Any]) -> NDArray[np.uint8] | None:
        """For an array of `empty`, or a contiguous part of one: a byte per byte, 1 if written."""
        begin = array.ctypes.data
        place = bisect.bisect_right(self._begins, begin)
        if place == 0:
            return None
        whole, marks = self._arrays[self._begins[place - 1]]
        offset = begin - whole.ctypes.data
        if offset + array.nbytes > whole.nbytes:
            return None
        return marks[offset : offset + array.nbytes]


class Host:
    """Performs launches, one at a time.

    `defines` are preprocessor switches; `directory` holds the kernel sources, if not ours.
    """

    def __init__(
        self,
        *,
        worker_count: int = 1,
        directory: Path | None = None,
        defines: Sequence[str] = (),
    ) -> None:
        self._worker_count = worker_count
        self._directory = directory or source_directory()
        self._defines = tuple(defines)
        self._functions: dict[tuple[str, str], Any] = {}

    def load(self, source: str, entries: Sequence[str]) -> None:
        """Build several entries of a source together, which is quicker than one by one."""
        path = host_library(self._directory / f"{source}.cu", entries, self._defines)
        library = ctypes.CDLL(str(path))
        for index, entry in enumerate(entries):
            self._functions[source, entry] = library[f"phaseloop_entry_{index}"]

    def run(
        self,
        launch: Launch,
        memory: Memory | None = None,
        *,
        order: Order = "forward",
        seed: int = 0,
        counts_banks: bool = False,
    ) -> Run:
        """Perform a launch on NumPy arrays.

        `order` is that of threads and blocks, `seed` that of a shuffled one.  Raises HostFault.
        """
        key = (launch.source, launch.entry)
        if key not in self._functions:
            self.load(launch.source, [launch.entry])
        values, regions = bind(launch, memory)
        request = Request(
            kernel=launch.entry.encode(),
            grid=(ctypes.c_uint32 * 3)(*launch.grid),
            block=(ctypes.c_uint32 * 3)(*launch.block),
            shared_bytes=launch.shared_bytes,
            region_count=len(regions),
            regions=(Region * len(regions))(*regions),
            arguments=(ctypes.c_void_p * len(values))(
                *(ctypes.addressof(value) for value in values)
            ),
            order=ORDERS.index(order),
            seed=seed,
            worker_count=self._worker_count,
            counts_banks=counts_banks,
        )
        report = Report()
        if self._functions[key](ctypes.byref(request), ctypes.byref(report)) != 0:
            raise HostFault(report.fault.decode(errors="replace"))
        return Run(report.collectives, report.barriers, bank_counts(report))


def bind(launch: Launch, memory: Memory | None) -> tuple[list[Any], list[Region]]:
    """The arguments' values as the kernel takes them, and the memory that it may touch."""
    values: list[Any] = []
    regions: list[Region] = []
    for argument in launch.arguments:
        if not isinstance(argument, Operand):
            values.append(ctypes.create_string_buffer(argument.value.tobytes()))
            continue
        array: Any = argument.array
        values.append(ctypes.c_void_p(None if array is None else array.ctypes.data))
        if array is not None:
            regions.append(region_of(argument, array, memory))
    return values, regions


def region_of(operand: Operand, array: NDArray[Any], memory: Memory | None) -> Region:
    is_writable = operand.access != "read"
    if is_writable and not array.flags.writeable:
        raise KernelError(f"{operand.name}: the kernel writes it, and the array is read-only")
    marks = None if memory is None else memory.marks(array)
    return Region(
        name=operand.name.encode(),
        begin=array.ctypes.data,
        bytes=array.nbytes,
        written=None if marks is None else marks.ctypes.data,
        is_writable=is_writable,
    )


def bank_counts(report: Report) -> tuple[Banks, ...]:
    counts = report.bank_counts[: report.bank_count_count]
    return tuple(
        Banks(
            f"{Path(count.file.decode()).name}:{count.line}",
            count.accesses,
            count.wavefronts,
            count.wavefronts_ideal,
        )
        for count in counts
    )
