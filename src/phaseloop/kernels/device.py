"""A machine that performs launches: memory, one queue of work, graphs of it, and copies.

Everything a device is told to do joins its queue and is done in order; only `download` and
`synchronize` wait.  Queues of several devices run at the same time, and are tied by events and by
`copy_from`.  `HostDevice` performs at once, on the CPU, with every access checked.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, cast

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .contract import Array, KernelError, Launch, Operand
from .host import Host, Memory

Event: TypeAlias = object  # a moment in a device's queue; only devices look inside
Replay: TypeAlias = Callable[[], None]
ALIGNMENT = 256  # bytes, of allocations and of parts of an arena


class Device(Protocol):
    """Raises KernelError for what it cannot do, DeviceMemoryError where memory ends."""

    @property
    def name(self) -> str:
        """As people know it: "Tesla V100-SXM2-16GB"."""
        ...

    @property
    def architecture(self) -> str:
        """What kernels are compiled for: "sm_70", or "host"."""
        ...

    @property
    def index(self) -> int:
        """Its number among the devices of the machine."""
        ...

    def load(self, source: str, entries: Sequence[str]) -> None:
        """Build entries of cuda/<source>.cu now, together, and not at their first launch."""
        ...

    def allocate(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        """Memory of its own until `close`; what it holds is undefined.  Not while capturing."""
        ...

    def release(self, array: Array) -> None:
        """Give what `allocate` returned back before `close`, when all that is queued is done."""
        ...

    def upload(self, source: NDArray[Any], target: Array) -> None:
        """Copy to the device.  `source` may change as soon as this returns.  Not in a capture."""
        ...

    def download(self, source: Array, target: NDArray[Any]) -> None:
        """Copy to `target`, after all that was queued before; waits for it.  Not in a capture."""
        ...

    def zero(self, target: Array) -> None: ...

    def copy(self, source: Array, target: Array) -> None:
        """Between arrays of this device, of one size; they do not overlap."""
        ...

    def copy_from(self, other: "Device", source: Array, target: Array) -> None:
        """From another device, after what is queued there, before what will be queued here.

        What is queued on `other` afterwards may write `source` only after the copy.  Not in a
        capture.  Peer to peer where that is allowed, through pinned memory of the host elsewhere.
        """
        ...

    def run(self, launch: Launch) -> None: ...

    def capture(self, body: Callable[[], None]) -> Replay:
        """What `body` runs and copies on this device, as one thing to queue again and again.

        It is recorded and not performed; addresses and value parameters are fixed by it.
        """
        ...

    def record(self) -> Event:
        """The moment at which all that is queued so far is done."""
        ...

    def wait(self, event: Event) -> None:
        """What is queued from now on waits for a moment of any device."""
        ...

    def synchronize(self) -> None:
        """Wait until all that is queued is done; raises what went wrong in it."""
        ...

    def memory_bytes(self) -> tuple[int, int]:
        """All there is, and what is free of it."""
        ...

    def close(self) -> None: ...


class DeviceMemoryError(KernelError):
    """An allocation that the device has no room for."""


def part(arena: Array, offset: int, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Of a u8 arena, an array from byte `offset` on: what numpy and CuPy slice alike."""
    whole: Any = arena
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    return whole[offset : offset + size].view(dtype).reshape(shape)


class HostDevice:
    """Implements Device on cuda/host.  Reads of what nothing wrote are faults.

    `memory_limit`: bytes that can be allocated, for tests of machines that have little.
    """

    architecture = "host"

    def __init__(
        self, index: int = 0, *, worker_count: int = 1, memory_limit: int | None = None
    ) -> None:
        self.index = index
        self.name = f"host shim {index}"
        self._host = Host(worker_count=worker_count)
        self._memory = Memory()
        self._recorded: list[Callable[[], None]] | None = None
        self._limit = memory_limit
        self._used = 0

    def load(self, source: str, entries: Sequence[str]) -> None:
        self._host.load(source, entries)

    def allocate(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        if self._limit is not None and self._used + size > self._limit:
            raise DeviceMemoryError(
                f"{self.name}: {size} bytes wanted, {self._limit - self._used} of {self._limit} "
                "are free"
            )
        self._used += size
        return self._memory.empty(shape, dtype)

    def release(self, array: Array) -> None:
        self._used -= array.nbytes
        self._memory.forget(on_host(array))

    def upload(self, source: NDArray[Any], target: Array) -> None:
        self._refuse_capture("upload")
        self._write(target, source)

    def download(self, source: Array, target: NDArray[Any]) -> None:
        self._refuse_capture("download")
        bytes_of(target)[:] = bytes_of(source)

    def zero(self, target: Array) -> None:
        self._perform(lambda: self._write(target, np.zeros(target.nbytes, np.uint8)))

    def copy(self, source: Array, target: Array) -> None:
        self._perform(lambda: self._write(target, bytes_of(source)))

    def copy_from(self, other: Device, source: Array, target: Array) -> None:
        self._refuse_capture("copy_from")
        content = np.empty(source.nbytes, np.uint8)
        other.download(source, content)
        self._write(target, content)

    def run(self, launch: Launch) -> None:
        self._perform(lambda: self._run(launch))

    def capture(self, body: Callable[[], None]) -> Replay:
        self._refuse_capture("capture")
        recorded: list[Callable[[], None]] = []
        self._recorded = recorded
        try:
            body()
        finally:
            self._recorded = None

        def replay() -> None:
            for step in recorded:
                step()

        return replay

    def record(self) -> Event:
        return None

    def wait(self, event: Event) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def memory_bytes(self) -> tuple[int, int]:
        if self._limit is not None:
            return self._limit, self._limit - self._used
        page = os.sysconf("SC_PAGE_SIZE")
        return os.sysconf("SC_PHYS_PAGES") * page, os.sysconf("SC_AVPHYS_PAGES") * page

    def close(self) -> None:
        self._memory = Memory()

    def _perform(self, step: Callable[[], None]) -> None:
        if self._recorded is None:
            step()
        else:
            self._recorded.append(step)

    def _refuse_capture(self, what: str) -> None:
        if self._recorded is not None:
            raise KernelError(f"{self.name}: {what} while a graph is captured")

    def _run(self, launch: Launch) -> None:
        for argument in launch.arguments:
            if not isinstance(argument, Operand) or argument.array is None:
                continue
            if argument.access == "write":
                self._forget(argument.array)
        self._host.run(launch, self._memory)

    def _forget(self, array: Array) -> None:
        """What is to be written has no content until then: nobody may read what was there."""
        marks = self._memory.marks(on_host(array))
        if marks is not None:
            marks[:] = 0
            bytes_of(array)[:] = 0xFF

    def _write(self, target: Array, content: NDArray[Any]) -> None:
        marks = self._memory.marks(on_host(target))
        bytes_of(target)[:] = bytes_of(content)
        if marks is not None:
            marks[:] = 1


def on_host(array: Array) -> NDArray[Any]:
    return cast(NDArray[Any], array)  # which `allocate` and `part` gave out


def bytes_of(array: Array) -> NDArray[np.uint8]:
    """In the same memory; the array is contiguous."""
    return on_host(array).reshape(-1).view(np.uint8)
