"""The host machine's place taken by a real device: same launches, same NumPy arrays, same tests.

What overlaps in the host's memory overlaps on the device, at the same alignment.  Around it lie
bytes that must stay, and what a kernel only reads must stay as well.
"""

import ctypes

import numpy as np
import pytest
from msgspec import Struct
from msgspec.structs import replace

from phaseloop.kernels.contract import KernelError, Operand
from phaseloop.kernels.device import part

GUARD = 4096  # bytes on either side: as far as a tile reaches beyond its end
ARENA_BYTES = 64 << 20
FILLED = 0xA5
ONLY_THERE = "the shim alone counts bank conflicts"


class Span(Struct):
    """Host memory that operands share; `begin` and `end` are addresses."""

    begin: int
    end: int
    operands: list[Operand]

    @property
    def lead(self) -> int:
        """Bytes before it on the device; what is aligned to 256 bytes there is so here."""
        return GUARD + self.begin % 256

    @property
    def image_bytes(self) -> int:
        return -(-(self.lead + self.end - self.begin + GUARD) // 256) * 256

    @property
    def is_written(self) -> bool:
        return any(operand.access != "read" for operand in self.operands)


class GpuHost:
    """As phaseloop.kernels.host.Host.  Orders are the device's own: each run has another one."""

    def __init__(self, device):
        self.device = device
        self._arena = None

    def load(self, source, entries):
        self.device.load(source, entries)

    def run(self, launch, memory=None, *, order="forward", seed=0, counts_banks=False):
        if counts_banks:
            pytest.skip(ONLY_THERE)
        spans = spans_of(launch)
        arena = self._room(sum(span.image_bytes for span in spans))
        places, before, offset = {}, [], 0
        for span in spans:
            image = image_of(span)
            place = part(arena, offset, image.shape, np.uint8)
            self.device.upload(image, place)
            before.append((span, place, image))
            for operand in span.operands:
                at = offset + span.lead + operand.array.ctypes.data - span.begin
                places[operand.name] = part(arena, at, operand.array.shape, operand.array.dtype)
            offset += span.image_bytes
        arguments = tuple(
            replace(each, array=places[each.name])
            if isinstance(each, Operand) and each.name in places
            else each
            for each in launch.arguments
        )
        self.device.run(replace(launch, arguments=arguments))
        for span, place, image in before:
            self._take_back(launch, span, place, image, memory)

    def _room(self, size):
        if self._arena is None or self._arena.nbytes < size:
            if self._arena is not None:
                self.device.release(self._arena)
            self._arena = self.device.allocate((max(ARENA_BYTES, size),), np.uint8)
        return self._arena

    def _take_back(self, launch, span, place, image, memory):
        found = np.empty_like(image)
        self.device.download(place, found)
        names = ", ".join(operand.name for operand in span.operands)
        content = slice(span.lead, span.lead + span.end - span.begin)
        outside = np.flatnonzero(found != image)
        outside = outside[(outside < content.start) | (outside >= content.stop)]
        if outside.size:
            where = int(outside[0]) - content.start
            raise KernelError(f"{launch.entry} wrote outside {names}, at byte {where}")
        if not span.is_written and not np.array_equal(found, image):
            raise KernelError(f"{launch.entry} wrote to {names}, which it only reads")
        for operand in span.operands:
            if operand.access != "read":
                array, at = operand.array, content.start + operand.array.ctypes.data - span.begin
                here = slice(at, at + array.nbytes)
                array.reshape(-1).view(np.uint8)[:] = found[here]
                if memory is not None and (marks := memory.marks(array)) is not None:
                    marks |= found[here] != image[here]  # what was written, as far as it shows


def spans_of(launch):
    """Operands by the memory they share, in the order of addresses."""
    spans = []
    operands = [each for each in launch.arguments if isinstance(each, Operand)]
    present = [each for each in operands if each.array is not None]
    for operand in sorted(present, key=lambda each: each.array.ctypes.data):
        begin = operand.array.ctypes.data
        end = begin + operand.array.nbytes
        if spans and begin < spans[-1].end:
            spans[-1].end = max(spans[-1].end, end)
            spans[-1].operands.append(operand)
        else:
            spans.append(Span(begin, end, [operand]))
    return spans


def image_of(span):
    image = np.full(span.image_bytes, FILLED, np.uint8)
    ctypes.memmove(image.ctypes.data + span.lead, span.begin, span.end - span.begin)
    return image
