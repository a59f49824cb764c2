"""A CUDA device through CuPy: its memory, one stream of work, graphs of it, and copies.

CuPy launches, and nothing else: kernels come from `loader` as machine code, memory from cudaMalloc
and not from CuPy's pool, so that addresses stay and graphs may keep them.
"""

import ctypes
import importlib
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from . import nvrtc
from .contract import Array, KernelError, Launch, Operand, check_contiguous
from .device import Device, DeviceMemoryError, Event, Replay
from .loader import cubin

Cupy: TypeAlias = Any  # the module, and what comes from it: CuPy has no types
REMEDY = "pip install 'phaseloop[cuda]' on Volta, cupy-cuda13x with a driver for CUDA 13 elsewhere"
VOLTA, CUDA_13 = (7, 2), 13000  # the last of Volta, the first that lacks it
STAGED_BYTES = 4 << 20  # of half a staging buffer: some 0.3 ms of PCIe
SHARED_PLAIN_MAX = 48 << 10  # bytes a block gets without asking
# Numbers of cudaDeviceAttr, CUfunction_attribute and cudaError, as CUDA's headers have them.
COMPUTE_MAJOR, COMPUTE_MINOR, SHARED_OPTIN = 75, 76, 97
DYNAMIC_SHARED = 8
HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE = 1, 2, 3
PORTABLE = 1  # pinned for all devices
OUT_OF_MEMORY = 2
REMEDIES = {
    35: f"the NVIDIA driver is older than CuPy's CUDA: update it, or {REMEDY}",
    100: "no GPU is visible: look at nvidia-smi, and at CUDA_VISIBLE_DEVICES",
    209: f"no machine code for this GPU: {REMEDY}",
    222: "the driver is older than the compiler: update the driver",
}


def load_cupy() -> Cupy:
    """CuPy.  Raises KernelError where it is missing or broken, with what to install.

    NVRTC goes first: CuPy takes the one that is loaded already, and by itself might find a newer
    one, which no longer knows Volta.
    """
    nvrtc.library()
    try:
        return importlib.import_module("cupy")
    except Exception as error:  # what it raises when a library of CUDA's is missing is its own
        raise KernelError(f"CuPy cannot be imported ({error}): {REMEDY}") from error


def device_count(cupy: Cupy) -> int:
    """How many there are; raises KernelError where the driver cannot say."""
    try:
        return cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise KernelError(explained(error)) from error


def explained(error: Cupy) -> str:
    remedy = REMEDIES.get(error.status)
    return f"{error}; {remedy}" if remedy else str(error)


class Half:
    """Half a staging buffer.  `event`: when the device is done with it."""

    def __init__(self, address: int) -> None:
        self.address = address
        self.event: Any = None


class Staging:
    """Pinned memory that copies pass through, one half after the other.

    While a device works on one half, the other can be filled.
    """

    def __init__(self, cupy: Cupy, half_bytes: int) -> None:
        self._runtime = cupy.cuda.runtime
        self.half_bytes = half_bytes
        self._address = self._runtime.hostAlloc(2 * half_bytes, PORTABLE)
        self.now = Half(self._address)
        self._next = Half(self._address + half_bytes)
        self._used = 0

    def turn(self) -> Half:
        """The other half; whoever uses it waits for its event first."""
        self.now, self._next, self._used = self._next, self.now, 0
        return self.now

    def put(self, content: NDArray[np.uint8], record: Callable[[], Any]) -> int:
        """Where a copy of `content`, no longer than a half, lies now.

        `record` marks the moment at which the device has read what was put before.
        """
        if self._used + content.nbytes > self.half_bytes:
            self.now.event = record()
            if self.turn().event is not None:
                self.now.event.synchronize()
        address = self.now.address + self._used
        ctypes.memmove(address, content.ctypes.data, content.nbytes)
        self._used += content.nbytes
        return address

    def close(self) -> None:
        self._runtime.freeHost(self._address)


class CupyDevice:
    """Implements Device on a GPU.  One thread at a time.

    `cupy` is what `load_cupy` returned; `staged_bytes` what is copied through pinned memory at a
    time.  Raises KernelError where this CuPy cannot serve this GPU.
    """

    def __init__(self, cupy: Cupy, index: int, *, staged_bytes: int = STAGED_BYTES) -> None:
        self.index = index
        self.name = f"CUDA device {index}"
        self._cuda = cupy.cuda
        self._new_array = cupy.ndarray
        self._allocated: list[int] = []
        self._functions: dict[tuple[str, str], Any] = {}
        self._shared_bytes: dict[tuple[str, str], int] = {}  # that a function was promised
        self._recorded: list[Callable[[], None]] | None = None
        self._is_closed = False
        self.peers: set[int] = set()  # devices whose memory may be copied from directly
        with self.current("opening it"):
            runtime = self._cuda.runtime
            properties = runtime.getDeviceProperties(index)
            self.name = properties["name"].decode(errors="replace")
            self.compute = (
                int(runtime.deviceGetAttribute(COMPUTE_MAJOR, index)),
                int(runtime.deviceGetAttribute(COMPUTE_MINOR, index)),
            )
            self.architecture = "sm_{}{}".format(*self.compute)
            check_toolkit(self.name, self.compute, runtime.runtimeGetVersion())
            self.shared_bytes_max: int = runtime.deviceGetAttribute(SHARED_OPTIN, index)
            self.stream = self._cuda.Stream(non_blocking=True)
            self._uploads = Staging(cupy, staged_bytes)
            self._downloads = Staging(cupy, staged_bytes)
            self._bridge = Staging(cupy, staged_bytes)

    # --- kernels ----------------------------------------------------------------------------------

    def load(self, source: str, entries: Sequence[str]) -> None:
        missing = [entry for entry in entries if (source, entry) not in self._functions]
        if not missing:
            return
        compiled = cubin(source, missing, architecture=self.architecture)
        with self.current(f"loading {source}"):
            module = self._cuda.function.Module()
            module.load(compiled.cubin)
            for entry in missing:
                function = module.get_function(compiled.names[entry])
                self._functions[source, entry] = function

    def run(self, launch: Launch) -> None:
        function = self._function(launch)
        arguments = tuple(
            self._pointer(argument) if isinstance(argument, Operand) else argument.value
            for argument in launch.arguments
        )
        self._perform(
            launch.entry,
            lambda: function(
                launch.grid, launch.block, arguments, launch.shared_bytes, self.stream
            ),
        )

    def _function(self, launch: Launch) -> Cupy:
        """Built and told what shared memory it needs, if it was not before."""
        key = (launch.source, launch.entry)
        self.load(launch.source, [launch.entry])
        function, wanted = self._functions[key], launch.shared_bytes
        if wanted > self.shared_bytes_max:
            raise KernelError(
                f"{launch.entry}: wants {wanted} bytes of shared memory for a block, {self.name} "
                f"has {self.shared_bytes_max}; this GPU cannot run it"
            )
        if wanted > self._shared_bytes.get(key, SHARED_PLAIN_MAX):
            with self.current(launch.entry):
                self._cuda.driver.funcSetAttribute(function.ptr, DYNAMIC_SHARED, wanted)
            self._shared_bytes[key] = wanted
        return function

    def _pointer(self, operand: Operand) -> Cupy:
        """As CuPy passes it: a pointer of this device, or null."""
        if operand.array is None:
            return np.uint64(0)
        return self._memory(operand.name, operand.array)

    # --- memory -----------------------------------------------------------------------------------

    def allocate(self, shape: tuple[int, ...], dtype: DTypeLike) -> Cupy:
        self._refuse_capture("allocate")
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        with self.current(f"allocating {size} bytes"):
            address = self._cuda.runtime.malloc(max(1, size))
        self._allocated.append(address)
        return self._array(address, shape, dtype)

    def release(self, array: Array) -> None:
        """Give what `allocate` returned back before `close`, when all that is queued is done."""
        address = self._memory("release", array).ptr
        self.synchronize()
        with self.current("giving memory back"):
            self._cuda.runtime.free(address)
        self._allocated.remove(address)

    def _array(self, address: int, shape: tuple[int, ...], dtype: DTypeLike) -> Cupy:
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        memory = self._cuda.UnownedMemory(address, size, self, self.index)
        return self._new_array(shape, dtype, self._cuda.MemoryPointer(memory, 0))

    def upload(self, source: NDArray[Any], target: Array) -> None:
        self._refuse_capture("upload")
        content = np.ascontiguousarray(source).reshape(-1).view(np.uint8)
        check_sizes("upload", content, target)
        address = self._memory("upload", target).ptr
        with self.current("upload"):
            for begin in range(0, content.nbytes, self._uploads.half_bytes):
                part = content[begin : begin + self._uploads.half_bytes]
                staged = self._uploads.put(part, self.record)
                self._copy(address + begin, staged, part.nbytes, HOST_TO_DEVICE)

    def download(self, source: Array, target: NDArray[Any]) -> None:
        self._refuse_capture("download")
        check_sizes("download", source, target)
        address = self._memory("download", source).ptr
        content = target.reshape(-1).view(np.uint8)
        step = self._downloads.half_bytes
        with self.current("download"):
            for begin in range(0, content.nbytes, step):
                part, staged = content[begin : begin + step], self._downloads.now.address
                self._copy(staged, address + begin, part.nbytes, DEVICE_TO_HOST)
                self.stream.synchronize()
                ctypes.memmove(part.ctypes.data, staged, part.nbytes)

    def zero(self, target: Array) -> None:
        address = self._memory("zero", target).ptr
        self._perform(
            "zero",
            lambda: self._cuda.runtime.memsetAsync(address, 0, target.nbytes, self.stream.ptr),
        )

    def copy(self, source: Array, target: Array) -> None:
        check_sizes("copy", source, target)
        before, after = self._memory("copy", source).ptr, self._memory("copy", target).ptr
        self._perform("copy", lambda: self._copy(after, before, source.nbytes, DEVICE_TO_DEVICE))

    def _copy(self, target: int, source: int, size: int, kind: int) -> None:
        self._cuda.runtime.memcpyAsync(target, source, size, kind, self.stream.ptr)

    def copy_from(self, other: Device, source: Array, target: Array) -> None:
        self._refuse_capture("copy_from")
        if not isinstance(other, CupyDevice):
            raise KernelError(f"copy_from: {other.name} is no CUDA device")
        check_sizes("copy_from", source, target)
        begin, end = other._memory("copy_from", source).ptr, self._memory("copy_from", target).ptr
        if other.index not in self.peers and other is not self:
            self._copy_through_host(other, begin, end, source.nbytes)
            return
        self.wait(other.record())
        with self.current(f"copying from device {other.index}"):
            self._cuda.runtime.memcpyPeerAsync(
                end, self.index, begin, other.index, source.nbytes, self.stream.ptr
            )
        other.wait(self.record())

    def _copy_through_host(self, other: "CupyDevice", source: int, target: int, size: int) -> None:
        """Nobody waits on the host: each device's stream waits for the other's."""
        for begin in range(0, size, self._bridge.half_bytes):
            count = min(self._bridge.half_bytes, size - begin)
            half = self._bridge.turn()
            if half.event is not None:
                other.wait(half.event)
            with other.current("copying to the host"):
                other._copy(half.address, source + begin, count, DEVICE_TO_HOST)
            self.wait(other.record())
            with self.current("copying from the host"):
                self._copy(target + begin, half.address, count, HOST_TO_DEVICE)
            half.event = self.record()

    def _memory(self, name: str, array: Array) -> Cupy:
        """CuPy's pointer to an array of this device; raises KernelError for any other."""
        memory = getattr(array, "data", None)
        place = getattr(memory, "device_id", None)
        if place != self.index:
            where = "the host's memory" if place is None else f"device {place}"
            raise KernelError(f"{name}: lies in {where}, not on device {self.index}")
        return memory

    # --- order ------------------------------------------------------------------------------------

    def capture(self, body: Callable[[], None]) -> Replay:
        """What `body` does is noted first, so that no kernel is built while CUDA captures."""
        self._refuse_capture("capture")
        self._recorded = steps = list[Callable[[], None]]()
        try:
            body()
        finally:
            self._recorded = None
        with self.current("capturing a graph"):
            self.stream.begin_capture()
            try:
                for step in steps:
                    step()
            finally:
                graph = self.stream.end_capture()
            graph.upload(self.stream)

        def replay() -> None:
            with self.current("replaying a graph"):
                graph.launch(self.stream)

        return replay

    def _perform(self, what: str, step: Callable[[], None]) -> None:
        if self._recorded is not None:
            self._recorded.append(step)
            return
        with self.current(what):
            step()

    def _refuse_capture(self, what: str) -> None:
        if self._recorded is not None:
            raise KernelError(f"{self.name}: {what} while a graph is captured")

    def record(self) -> Event:
        with self.current("recording an event"):
            event = self._cuda.Event(disable_timing=True)
            event.record(self.stream)
        return event

    def wait(self, event: Event) -> None:
        with self.current("waiting for an event"):
            self.stream.wait_event(event)

    def synchronize(self) -> None:
        with self.current("waiting for its work"):
            self.stream.synchronize()

    def memory_bytes(self) -> tuple[int, int]:
        with self.current("asking for its memory"):
            free, total = self._cuda.runtime.memGetInfo()
        return total, free

    def close(self) -> None:
        """Arrays that were allocated must not be used afterwards."""
        if self._is_closed:
            return
        self._is_closed = True
        self._functions.clear()
        with self.current("giving its memory back"):
            self.stream.synchronize()
            for address in self._allocated:
                self._cuda.runtime.free(address)
            for staging in (self._uploads, self._downloads, self._bridge):
                staging.close()

    @contextmanager
    def current(self, what: str) -> Generator[None]:
        """CuPy's calls are about this device; what they raise becomes a KernelError."""
        cuda = self._cuda
        try:
            with cuda.Device(self.index):
                yield
        except (cuda.runtime.CUDARuntimeError, cuda.driver.CUDADriverError) as error:
            message = f"{self.name} (device {self.index}), {what}: {explained(error)}"
            if error.status == OUT_OF_MEMORY:
                raise DeviceMemoryError(f"{message}; {self._room()}") from error
            raise KernelError(message) from error

    def _room(self) -> str:
        free, total = self._cuda.runtime.memGetInfo()
        return f"{free} of {total} bytes are free"


def check_toolkit(name: str, compute: tuple[int, int], cuda: int) -> None:
    """Raises KernelError where CuPy's CUDA, 13020 for 13.2, has given the GPU up."""
    if compute <= VOLTA and cuda >= CUDA_13:
        major, minor = compute
        raise KernelError(
            f"{name} has compute capability {major}.{minor}, and CuPy was built for CUDA "
            f"{cuda // 1000}.{cuda % 1000 // 10}, which no longer knows it: "
            "pip uninstall cupy-cuda13x, then pip install 'phaseloop[cuda]'"
        )


def check_sizes(what: str, source: Array, target: Array) -> None:
    if source.nbytes != target.nbytes:
        raise KernelError(f"{what}: {source.nbytes} bytes for {target.nbytes}")
    check_contiguous(what, source)
    check_contiguous(what, target)
