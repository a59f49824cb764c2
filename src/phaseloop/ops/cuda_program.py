"""Steps over values that nobody has given memory yet, and the memory they are given.

A pass is planned once per shape: each step names what it reads and writes, so it is known from when
to when a value is needed, and values that are never needed at the same time share bytes of their
device's arena.  Only then are launches made, with addresses that stay.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from msgspec import Struct

from phaseloop.kernels.contract import DTYPES, Array, Launch, Planned, check_contiguous
from phaseloop.kernels.device import ALIGNMENT, part

Shape: TypeAlias = tuple[int, ...]


class Storage(Struct, eq=False):
    """Bytes of a device's arena from step `first` to step `last`."""

    device: int
    size: int
    first: int
    last: int
    offset: int = 0


class Value(Struct, frozen=True, eq=False):
    """An array in a storage, or a part of one."""

    storage: Storage
    shape: Shape
    kind: str  # as `dims` names types
    begin: int = 0  # bytes

    def shaped(self, *shape: int) -> "Value":
        """The same elements in another shape."""
        assert int(np.prod(shape)) == int(np.prod(self.shape)), (shape, self.shape)
        return Value(self.storage, shape, self.kind, self.begin)

    def rows(self, first: int, count: int) -> "Value":
        row = int(np.prod(self.shape[1:])) * DTYPES[self.kind].itemsize
        return Value(self.storage, (count, *self.shape[1:]), self.kind, self.begin + first * row)


At: TypeAlias = Callable[[Value], Array]
Make: TypeAlias = Callable[[At], tuple[Launch, ...]]


class Step(Struct, frozen=True):
    """Launches of one device."""

    device: int
    make: Make


class Hop(Struct, frozen=True):
    """A copy from one device to another."""

    source: Value
    target: Value


class Program:
    """Steps in order; it grows until it is placed."""

    def __init__(self) -> None:
        self.steps: list[Step | Hop] = []
        self.storages: list[Storage] = []

    def new(self, device: int, kind: str, *shape: int) -> Value:
        """A value that the next step writes."""
        size = int(np.prod(shape)) * DTYPES[kind].itemsize
        storage = Storage(device, size, len(self.steps), len(self.steps))
        self.storages.append(storage)
        return Value(storage, shape, kind)

    def step(self, device: int, uses: Sequence[Value], make: Make) -> None:
        self._use(*uses)
        self.steps.append(Step(device, make))

    def hop(self, source: Value, device: int) -> Value:
        target = self.new(device, source.kind, *source.shape)
        self._use(source, target)
        self.steps.append(Hop(source, target))
        return target

    def keep(self, value: Value) -> None:
        """It is read after the last step."""
        value.storage.last = len(self.steps)

    def _use(self, *values: Value) -> None:
        for value in values:
            value.storage.last = len(self.steps)

    def place(self, device_count: int) -> list[int]:
        """Give every storage its offset; -> the bytes of each device's arena."""
        sizes = [0] * device_count
        placed: list[list[Storage]] = [[] for _ in range(device_count)]
        for storage in sorted(self.storages, key=lambda one: (one.first, -one.size)):
            others = placed[storage.device]
            others[:] = [other for other in others if other.last >= storage.first]
            storage.offset = first_gap(storage.size, others)
            others.append(storage)
            end = storage.offset + storage.size
            sizes[storage.device] = max(sizes[storage.device], end)
        return sizes


def first_gap(size: int, taken: Sequence[Storage]) -> int:
    """The lowest offset with `size` free bytes."""
    offset = 0
    for other in sorted(taken, key=lambda one: one.offset):
        if offset + size <= other.offset:
            break
        offset = max(offset, aligned(other.offset + other.size))
    return offset


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def bound(arenas: Sequence[Array]) -> At:
    """Finds values in arenas; a planned arena gives planned values."""

    def at(value: Value) -> Array:
        arena = arenas[value.storage.device]
        if isinstance(arena, Planned):
            return Planned(value.shape, DTYPES[value.kind])
        begin = value.storage.offset + value.begin
        return part(arena, begin, value.shape, DTYPES[value.kind])

    return at


class Stretch(Struct, frozen=True):
    """Consecutive launches of one device."""

    device: int
    launches: tuple[Launch, ...]


class Crossing(Struct, frozen=True):
    source_device: int
    target_device: int
    source: Array
    target: Array


def stretches(program: Program, at: At) -> Iterator[Stretch | Crossing]:
    """What a placed program does, in order."""
    device, launches = -1, list[Launch]()
    for step in program.steps:
        if launches and (isinstance(step, Hop) or step.device != device):
            yield Stretch(device, tuple(launches))
            launches = []
        if isinstance(step, Hop):
            source, target = step.source, step.target
            yield Crossing(source.storage.device, target.storage.device, at(source), at(target))
        else:
            device = step.device
            launches += step.make(at)
    if launches:
        yield Stretch(device, tuple(launches))


def rows_of(array: Array, first: int, count: int) -> Array:
    """Some rows of an array, planned or not."""
    if isinstance(array, Planned):
        return Planned((count, *array.shape[1:]), array.dtype)
    whole: Any = array
    chosen = whole[first : first + count]
    check_contiguous("rows", chosen)
    return chosen
