"""KV regions in one reserved address range: memory is paid for as positions are written.

Layout, per layer first keys, then values: [region][position][head][width], a row being one
position.  Every region has its full capacity of addresses, so where a position lies depends on
nothing but its region; untouched pages cost nothing, and truncation gives pages back.
"""

import math
import mmap
from typing import Literal

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize
from msgspec import Struct
from numpy.typing import NDArray

from .interface import BackendError, Dimensions, Region, Snapshot
from .rope import Doubles, angles, turn

CacheKind = Literal["F16", "Q8_0"]
Bytes = NDArray[np.uint8]
MAP_NORESERVE = 0x4000  # Linux; Python's mmap does not name it
POSITION_STEP = 256  # capacity is a multiple, so that a view may be rounded up


class Plane(Struct, frozen=True):
    """The keys, or the values, of one layer, of all regions."""

    offset: int  # bytes from the start of the range
    width: int  # values of one head
    row_bytes: int


class Regions:
    def __init__(
        self, dimensions: Dimensions, kind: CacheKind, *, count: int, capacity: int
    ) -> None:
        self.kind: CacheKind = kind
        self.count = count
        self._type = GGMLQuantizationType[kind]
        self._ropes = dimensions.ropes
        self._heads = dimensions.kv_head_count
        widths = dimensions.key_length, dimensions.value_length
        rows = [self._row_bytes(width) for width in widths]
        # Whole pages per region and plane, or truncating one would take pages of its neighbour.
        step = math.lcm(POSITION_STEP, *(mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, r) for r in rows))
        self.capacity = -(-capacity // step) * step
        self.planes: list[tuple[Plane, Plane]] = []
        offset = 0
        for _ in dimensions.ropes:
            pair: list[Plane] = []
            for width, row_bytes in zip(widths, rows, strict=True):
                pair.append(Plane(offset, width, row_bytes))
                offset += row_bytes * self.capacity * count
            self.planes.append((pair[0], pair[1]))
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        try:
            self._range = mmap.mmap(-1, offset, flags=flags)
        except (OSError, OverflowError, ValueError) as error:
            raise BackendError(
                f"cannot reserve {offset} bytes of addresses for {count} sequences of "
                f"{self.capacity} tokens: {error}; lower the context or the number of slots"
            ) from error
        self.memory: Bytes = np.frombuffer(self._range, np.uint8)

    @property
    def position_bytes(self) -> int:
        """What one position of one sequence takes."""
        return sum(keys.row_bytes + values.row_bytes for keys, values in self.planes)

    def truncate(self, region: Region, length: int) -> None:
        for plane in self._all_planes():
            start = plane.offset + (region * self.capacity + length) * plane.row_bytes
            end = plane.offset + (region + 1) * self.capacity * plane.row_bytes
            first_page = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
            if first_page < end:
                self._range.madvise(mmap.MADV_DONTNEED, first_page, end - first_page)

    def copy(self, source: Region, target: Region, length: int) -> None:
        for plane in self._all_planes():
            self._rows(plane, target, 0, length)[:] = self._rows(plane, source, 0, length)

    def save(self, region: Region, length: int) -> Snapshot:
        planes = self._all_planes()
        return Snapshot(length, tuple(self._rows(p, region, 0, length).copy() for p in planes))

    def restore(self, region: Region, snapshot: Snapshot) -> None:
        for plane, part in zip(self._all_planes(), snapshot.parts, strict=True):
            self._rows(plane, region, 0, snapshot.length)[:] = part

    def shift(
        self,
        region: Region,
        start: int,
        count: int,
        length: int,
        factors: dict[str, Doubles],
    ) -> None:
        """Drop [start, start + count); later keys turn back by `count` positions."""
        kept = length - start - count
        back = np.full(kept, -count)
        for (keys, values), rope in zip(self.planes, self._ropes, strict=True):
            moved = dequantize(self._rows(keys, region, start + count, kept), self._type)
            heads = moved.reshape(kept, self._heads, keys.width).astype(np.float64)
            angle = angles(rope, factors[rope.factors] if rope.factors else None, back)
            turned = turn(heads, rope, angle, 1.0).astype(np.float32).reshape(kept, -1)
            packed = np.ascontiguousarray(quantize(turned, self._type)).view(np.uint8)
            self._rows(keys, region, start, kept)[:] = packed
            late = self._rows(values, region, start + count, kept).copy()
            self._rows(values, region, start, kept)[:] = late
        self.truncate(region, length - count)

    def close(self) -> None:
        """Give the addresses back; whoever still holds a view keeps them alive."""
        self.memory = np.zeros(0, np.uint8)

    def _rows(self, plane: Plane, region: Region, start: int, count: int) -> Bytes:
        first = plane.offset + (region * self.capacity + start) * plane.row_bytes
        flat = self.memory[first : first + count * plane.row_bytes]
        return flat.reshape(count, plane.row_bytes)

    def _all_planes(self) -> list[Plane]:
        return [plane for pair in self.planes for plane in pair]

    def _row_bytes(self, width: int) -> int:
        block, block_bytes = GGML_QUANT_SIZES[self._type]
        if width % block:
            raise BackendError(
                f"a {self.kind} KV cache needs heads of a multiple of {block}, this model has "
                f"{width}; use an F16 cache"
            )
        return self._heads * width // block * block_bytes
