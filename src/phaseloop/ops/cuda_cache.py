"""What happens to pages of all layers besides attention: copies, snapshots, shifts."""

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from phaseloop.kernels import cells, rope
from phaseloop.kernels.contract import Array
from phaseloop.kernels.device import Device, part
from phaseloop.kernels.kv import PAGE, Cache

from .cuda_pages import PageCopy, Pages, pages_for
from .cuda_program import rows_of
from .cuda_store import Placed, cell_of, planes_of
from .interface import Dimensions, Region, Rope

Bytes: TypeAlias = NDArray[np.uint8]
# Axes of a page of each plane, positions first: kernels/kv.py has them in other orders.
POSITION_FIRST = {
    "keys": (2, 0, 1, 3),
    "values": (1, 3, 0, 2),
    "key_scales": (2, 0, 1),
    "value_scales": (2, 0, 1),
}
COPIES_MAX = 1024  # pages copied by one launch


class Layer(Struct, frozen=True):
    device: int
    cache: Cache
    rope: Rope


class Desk(Struct, frozen=True):
    """A device's memory for what the few launches here are told."""

    pairs: Array  # i32 [COPIES_MAX, 2]
    source: Array  # i32 [pages of a region]
    target: Array
    position: Array  # i32 [1, 1]
    turns: Array  # f32 [1, pairs of the widest rope, 2], as bytes


class CacheMover:
    def __init__(
        self, devices: Sequence[Device], placed: Placed, dimensions: Dimensions, pages_max: int
    ) -> None:
        self._devices, self._placed = devices, placed
        self._layers = [
            Layer(device, cache, dimensions.ropes[layer])
            for (device, layer), cache in sorted(placed.caches.items(), key=lambda one: one[0][1])
        ]
        widest = max((layer.rope.dimensions for layer in self._layers), default=2)
        self._desks = [desk_of(device, pages_max, widest) for device in devices]

    @property
    def position_bytes(self) -> int:
        planes = [one for layer in self._layers for one in planes_of(layer.cache).values()]
        return sum(one.nbytes // one.shape[0] for one in planes) // PAGE

    def copy(self, copies: Sequence[PageCopy]) -> None:
        for first in range(0, len(copies), COPIES_MAX):
            chosen = copies[first : first + COPIES_MAX]
            numbers = np.array([(one.source, one.target) for one in chosen], np.int32)
            for index, device in enumerate(self._devices):
                pairs = rows_of(self._desks[index].pairs, 0, len(chosen))
                device.upload(numbers, pairs)
                for layer in self._layers_on(index):
                    for plane in planes_of(layer.cache).values():
                        device.run(cells.copy_pages(plane, pairs))

    def save(self, pages: Sequence[int], length: int) -> tuple[Bytes, ...]:
        """Per layer and plane the bytes of each position: [length, bytes]."""
        for device in self._devices:
            device.synchronize()
        return tuple(
            self._saved(self._devices[layer.device], name, plane, pages, length)
            for layer, name, plane in self._planes()
        )

    def restore(self, pages: Sequence[int], parts: Sequence[Bytes], length: int) -> None:
        for (layer, name, plane), content in zip(self._planes(), parts, strict=True):
            device, axes = self._devices[layer.device], POSITION_FIRST[name]
            shape = tuple(plane.shape[1:][axis] for axis in axes)
            for index, page in enumerate(pages[: pages_for(length)]):
                positions = np.zeros((PAGE, content.shape[1]), np.uint8)
                rows = content[index * PAGE : min(length, (index + 1) * PAGE)]
                positions[: len(rows)] = rows
                ordered = positions.view(plane.dtype).reshape(shape).transpose(np.argsort(axes))
                device.upload(np.ascontiguousarray(ordered), cell_of(plane, page))

    def shift(self, pages: Pages, region: Region, start: int, count: int, length: int) -> None:
        """Page by page, each into a fresh one: what a page is made of lies in it or after it."""
        first = start // PAGE
        pages.check_replaceable(region, first)
        before = np.array(pages.table(region), np.int32)
        for index, device in enumerate(self._devices):
            desk = self._desks[index]
            device.upload(before, rows_of(desk.source, 0, len(before)))
            device.upload(np.full((1, 1), -count, np.int32), desk.position)
        for number in range(first, pages_for(length - count)):
            copy = pages.replace(region, number)
            begin = max(start, number * PAGE)
            if begin > number * PAGE:
                self.copy([copy])
            end = min(length, (number + 1) * PAGE + count)
            self._shift_page(pages.table(region), begin, count, end, len(before))
        pages.truncate(region, length - count)

    def _shift_page(
        self, table: Sequence[int], start: int, count: int, length: int, page_count: int
    ) -> None:
        after = np.array(table, np.int32)
        for index, device in enumerate(self._devices):
            desk = self._desks[index]
            source, target = (rows_of(one, 0, page_count) for one in (desk.source, desk.target))
            device.upload(after, target)
            turned: Rope | None = None
            for layer in self._layers_on(index):
                half = layer.rope.dimensions // 2
                turns = part(desk.turns, 0, (1, half, 2), np.float32)
                if layer.rope != turned:
                    frequencies = self._placed.frequencies(index, layer.rope)
                    device.run(rope.angles(desk.position, frequencies, turns))
                    turned = layer.rope
                device.run(
                    cells.shift(
                        layer.cache,
                        part(desk.turns, 0, (half, 2), np.float32),
                        source,
                        target,
                        pairs=layer.rope.pairs,
                        start=start,
                        count=count,
                        length=length,
                    )
                )

    def _layers_on(self, device: int) -> list[Layer]:
        return [layer for layer in self._layers if layer.device == device]

    def _planes(self) -> Iterator[tuple[Layer, str, Array]]:
        for layer in self._layers:
            for name, plane in planes_of(layer.cache).items():
                yield layer, name, plane

    def _saved(
        self, device: Device, name: str, plane: Array, pages: Sequence[int], length: int
    ) -> Bytes:
        found: NDArray[Any] = np.empty((pages_for(length), *plane.shape[1:]), plane.dtype)
        for index, page in enumerate(pages[: pages_for(length)]):
            device.download(cell_of(plane, page), found[index])
        axes = (0, *(1 + axis for axis in POSITION_FIRST[name]))
        ordered = np.ascontiguousarray(found.transpose(axes))
        whole = pages_for(length) * PAGE
        return ordered.reshape(-1).view(np.uint8).reshape(whole, -1)[:length].copy()


def desk_of(device: Device, pages_max: int, widest: int) -> Desk:
    def words(*shape: int) -> Array:
        return device.allocate(shape, np.int32)

    turns = device.allocate((4 * widest,), np.uint8)
    pairs = words(COPIES_MAX, 2)
    return Desk(pairs, words(pages_max), words(pages_max), words(1, 1), turns)
