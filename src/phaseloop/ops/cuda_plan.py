"""Plans of passes: built once per shape, with addresses that stay, and used again.

What changes from pass to pass (tokens, positions, page tables, lengths) lies in a buffer of each
device that is filled before; so plans of generated rows are captured as graphs.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from phaseloop.kernels.contract import Array, Launch, Planned
from phaseloop.kernels.device import ALIGNMENT, Device, Replay, part

from .cuda_graph import CudaOps
from .cuda_lower import Lowering
from .cuda_needs import Needs
from .cuda_program import Crossing, Program, Stretch, Value, aligned, bound, stretches
from .cuda_shape import Inputs, PassShape, Store, input_shapes
from .interface import Dimensions, Network, Weight

PLANS_KEPT = 64
WORD = 4  # bytes of an input
STEP = ALIGNMENT // WORD
PLANNED_BYTES = Planned((0,), np.dtype(np.uint8))


class Subject(Struct, frozen=True):
    """What is planned: a network, and where its weights lie.

    `device_of` says it of a weight by which rows are multiplied; embeddings are looked up on the
    first device that has a layer.
    """

    network: Network
    weights: Mapping[str, Weight]
    dimensions: Dimensions
    device_count: int
    device_of: Callable[[str], int]
    first_device: int = 0


def program_of(
    subject: Subject, store: Store, inputs: Sequence[Inputs], shape: PassShape
) -> tuple[Program, Value | None]:
    """-> the steps of a pass, and the logits, where they are wanted."""
    ops = CudaOps(
        subject.weights, subject.dimensions.recurrence, shape.row_count, shape.taken or None
    )
    logits = subject.network(ops)
    lowering = Lowering(store, inputs, shape, subject.device_of, subject.first_device)
    found = lowering.lower(ops.effects, None if shape.taken == 0 else logits)
    return lowering.program, found


class Layout(Struct, frozen=True):
    """Where each input lies, in words, and how many words all are."""

    places: dict[str, tuple[int, tuple[int, ...]]]
    size: int


def layout_of(shape: PassShape) -> Layout:
    places: dict[str, tuple[int, tuple[int, ...]]] = {}
    end = 0
    for name, dims in input_shapes(shape).items():
        places[name] = (end, dims)
        end += -(-int(np.prod(dims)) // STEP) * STEP
    return Layout(places, end)


def inputs_in(buffer: Array, layout: Layout) -> Inputs:
    return Inputs(
        **{
            name: Planned(dims, np.dtype(np.int32))
            if isinstance(buffer, Planned)
            else part(buffer, WORD * begin, dims, np.int32)
            for name, (begin, dims) in layout.places.items()
        }
    )


# --- before anything is allocated -----------------------------------------------------------------


class Tried(Struct, frozen=True):
    """Of a pass: bytes of each device's arena, and each device's launches."""

    sizes: list[int]
    launches: list[list[Launch]]


def trial(subject: Subject, needs: Needs, shape: PassShape) -> Tried:
    """Plan a pass over nothing; `needs` learns what it reads.

    Raises KernelError or BackendError for what cannot be run.
    """
    layout = layout_of(shape)
    inputs = [inputs_in(PLANNED_BYTES, layout)] * subject.device_count
    program, _ = program_of(subject, needs, inputs, shape)
    sizes = program.place(subject.device_count)
    launches: list[list[Launch]] = [[] for _ in range(subject.device_count)]
    for one in stretches(program, bound([PLANNED_BYTES] * subject.device_count)):
        if isinstance(one, Stretch):
            launches[one.device] += one.launches
    return Tried(sizes, launches)


# --- afterwards -----------------------------------------------------------------------------------


class Plan(Struct, frozen=True):
    layout: Layout
    steps: tuple[Replay, ...]  # each queues some work
    logits: Array | None
    device: int  # that gives the logits

    def run(self) -> None:
        for step in self.steps:
            step()


class Planner:
    """Plans over what lies on the devices; keeps those used last.

    `arena_bytes` and `input_words` are the most that any pass takes.
    """

    def __init__(
        self,
        subject: Subject,
        devices: Sequence[Device],
        store: Store,
        arena_bytes: Sequence[int],
        input_words: int,
    ) -> None:
        self._subject, self._devices, self._store = subject, devices, store
        self._arena_bytes = arena_bytes
        self._arenas = [
            device.allocate((max(1, aligned(size)),), np.uint8)
            for device, size in zip(devices, arena_bytes, strict=True)
        ]
        self._buffers = [device.allocate((WORD * input_words,), np.uint8) for device in devices]
        self._plans: OrderedDict[PassShape, Plan] = OrderedDict()

    def plan(self, shape: PassShape) -> Plan:
        plan = self._plans.get(shape)
        if plan is None:
            plan = self._plans[shape] = self._build(shape)
            if len(self._plans) > PLANS_KEPT:
                self._plans.popitem(last=False)
        self._plans.move_to_end(shape)
        return plan

    def fill(self, layout: Layout, values: Mapping[str, NDArray[np.int32]]) -> None:
        """Hand a pass's inputs to all devices; what is not named is zero."""
        words = np.zeros(layout.size, np.int32)
        for name, content in values.items():
            begin, _ = layout.places[name]
            words[begin : begin + content.size] = content.reshape(-1)
        for device, buffer in zip(self._devices, self._buffers, strict=True):
            device.upload(words, part(buffer, 0, (layout.size,), np.int32))

    def logits(self, plan: Plan, target: NDArray[np.float32]) -> None:
        """Wait for what a plan gave."""
        assert plan.logits is not None, "a plan that gives logits"
        whole: Any = plan.logits
        self._devices[plan.device].download(whole[: len(target)], target)

    def close(self) -> None:
        self._plans.clear()

    def _build(self, shape: PassShape) -> Plan:
        layout = layout_of(shape)
        inputs = [inputs_in(buffer, layout) for buffer in self._buffers]
        program, found = program_of(self._subject, self._store, inputs, shape)
        sizes = program.place(len(self._devices))
        for size, most in zip(sizes, self._arena_bytes, strict=True):
            assert size <= most, f"a pass of {shape} takes {size} bytes of {most} in an arena"
        at = bound(self._arenas)
        steps = [
            self._captured(one) if shape.generated else self._listed(one)
            for one in stretches(program, at)
        ]
        if found is None:
            return Plan(layout, tuple(steps), None, 0)
        return Plan(layout, tuple(steps), at(found), found.storage.device)

    def _listed(self, one: Stretch | Crossing) -> Replay:
        if isinstance(one, Crossing):
            source, target = self._devices[one.source_device], self._devices[one.target_device]
            return lambda: target.copy_from(source, one.source, one.target)
        device = self._devices[one.device]

        def run() -> None:
            for launch in one.launches:
                device.run(launch)

        return run

    def _captured(self, one: Stretch | Crossing) -> Replay:
        listed = self._listed(one)
        return self._devices[one.device].capture(listed) if isinstance(one, Stretch) else listed
