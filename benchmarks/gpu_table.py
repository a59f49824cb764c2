"""What kernels reach on a GPU, beside what a copy and cuBLAS reach on the same one.

Each case's launches lie in a CUDA graph, over as many sets of operands as it takes for the caches
to be of no help; two events around a replay give the time, the median of several the figure.
Weights are random bits, activations random halves.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from gpu_operands import Filler, operand_bytes, with_two_states
from kernel_shapes import Case
from msgspec import Struct

from phaseloop.kernels.contract import Array, KernelError, Launch, traffic_bytes
from phaseloop.kernels.cupy_device import Cupy, CupyDevice
from phaseloop.kernels.device import DeviceMemoryError, part

COPIED_BYTES = 1 << 29
GEMM_SIZE = 8192
SETS_MAX = 64
MEMORY_SHARE = 0.5  # of what is free, for the operands of one case
REPLAY_MS = 4.0  # a graph takes about so long, that an event's own time is nothing beside it
REPEATS, WARM_UPS = 9, 2
CASE_S_MAX = 3.0
L2_BYTES = 38  # cudaDevAttrL2CacheSize
# Of cuBLAS's and CUDA's enumerations: operations, types, FP32 accumulation, the default algorithm.
PLAIN, TRANSPOSED, F32, F16, IN_F32, DEFAULT = 0, 1, 0, 2, 68, -1


class Ceilings(Struct, frozen=True):
    copy_bytes_s: float  # read and written
    gemm_flops: float | None  # f16 by f16 into f32, of cuBLAS; None where it cannot be had
    gemm_note: str = ""  # why not


class Reached(Struct, frozen=True):
    """Rates are per second.  With a note, which says why, there are none."""

    model: str
    name: str
    entry: str
    unit: str  # which of the GPU's units computes
    median_us: float = 0
    bytes_s: float = 0
    flops: float = 0
    is_cold: bool = False  # the operands together are at least twice the L2 cache
    note: str = ""


class Bench:
    """Times what a device is told to do."""

    def __init__(self, cupy: Cupy, device: CupyDevice) -> None:
        self._device = device
        self._cuda = cupy.cuda
        with device.current("asking for its cache"):
            self.l2_bytes: int = self._cuda.runtime.deviceGetAttribute(L2_BYTES, device.index)
        self._filler = Filler(device)

    def reach(self, case: Case) -> Reached:
        """Raises nothing for what this GPU cannot do: the note says it."""
        named = (case.model, case.name, case.launch.entry, case.unit)
        launch, moved = with_two_states(case.launch), traffic_bytes(case.launch)
        try:
            sets = self._sets(moved, operand_bytes(launch))
            each_s = self._seconds(launch, sets)
        except KernelError as error:
            return Reached(*named, note=str(error))
        is_cold = sets * moved >= 2 * self.l2_bytes
        rates = moved / each_s, case.operations / each_s
        return Reached(*named, each_s * 1e6, *rates, is_cold)

    def _sets(self, moved: int, size: int) -> int:
        """How many sets of operands of `size` bytes, of which a launch moves so many."""
        free = self._device.memory_bytes()[1]
        room = int(free * MEMORY_SHARE) // size
        if room < 1:
            raise DeviceMemoryError(f"wants {size} bytes, {free} are free")
        return min(SETS_MAX, room, math.ceil(2 * self.l2_bytes / max(1, moved)))

    def _seconds(self, launch: Launch, sets: int) -> float:
        """Of one launch."""
        device, size = self._device, operand_bytes(launch)
        arena = device.allocate((sets * size,), np.uint8)
        try:
            launches = [self._filler.place(launch, arena, index * size) for index in range(sets)]
            device.run(launches[0])
            once_ms = self._elapsed_ms(lambda: device.run(launches[0]))
            rounds = max(1, round(REPLAY_MS / max(once_ms, 1e-3) / sets))
            replay = device.capture(lambda: self._run_all(launches * rounds))
            return self.median_ms(replay) / 1e3 / (rounds * sets)
        finally:
            device.release(arena)

    def _run_all(self, launches: Iterable[Launch]) -> None:
        for launch in launches:
            self._device.run(launch)

    def median_ms(self, work: Callable[[], object]) -> float:
        """Of what `work` queues; as many repeats as there is time for, at least one."""
        deadline = time.monotonic() + CASE_S_MAX
        for _ in range(WARM_UPS):
            self._elapsed_ms(work)
        samples = [self._elapsed_ms(work)]
        while len(samples) < REPEATS and time.monotonic() < deadline:
            samples.append(self._elapsed_ms(work))
        return statistics.median(samples)

    def _elapsed_ms(self, work: Callable[[], object]) -> float:
        with self._device.current("timing"):
            begin, end = self._cuda.Event(), self._cuda.Event()
            begin.record(self._device.stream)
            work()
            end.record(self._device.stream)
            end.synchronize()
            return self._cuda.get_elapsed_time(begin, end)

    # --- ceilings ---------------------------------------------------------------------------------

    def ceilings(self) -> Ceilings:
        try:
            flops, note = self._gemm_flops(), ""
        except (KernelError, ImportError, RuntimeError) as error:  # a missing library, or no memory
            flops, note = None, f"{error}; pip install 'cupy-cuda12x[ctk]' brings cuBLAS"
        return Ceilings(self._copy_rate(), flops, note)

    def _copy_rate(self) -> float:
        device, size = self._device, min(COPIED_BYTES, self._device.memory_bytes()[1] // 4)
        arena = device.allocate((2 * size,), np.uint8)
        try:
            source, target = (part(arena, begin, (size,), np.uint8) for begin in (0, size))
            return 2 * size / (self.median_ms(lambda: device.copy(source, target)) / 1e3)
        finally:
            device.release(arena)

    def _gemm_flops(self) -> float:
        cublas: Any = self._cuda.cublas
        size, device = GEMM_SIZE, self._device
        one, zero = np.array(1, np.float32), np.array(0, np.float32)
        with device.current("opening cuBLAS"):
            handle = cublas.create()
        halves = device.allocate((2, size, size), np.float16)
        product = device.allocate((size, size), np.float32)

        def multiply() -> None:
            a, b, c = address(halves), address(halves) + size * size * 2, address(product)
            with device.stream:
                cublas.gemmEx(
                    handle, TRANSPOSED, PLAIN, size, size, size, one.ctypes.data, a, F16, size,
                    b, F16, size, zero.ctypes.data, c, F32, size, IN_F32, DEFAULT,
                )  # fmt: skip

        try:
            self._filler.fill(halves)
            return 2 * size**3 / (self.median_ms(multiply) / 1e3)
        finally:
            device.release(halves)
            device.release(product)
            with device.current("closing cuBLAS"):
                cublas.destroy(handle)


def address(array: Array) -> int:
    there: Any = array
    return there.data.ptr
