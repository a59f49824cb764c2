"""What a network needs on each device, found by planning passes over arrays that nobody allocated.

The same code plans passes later, over what then lies there (cuda_store); so nothing can be missing,
and what no kernel can take is refused before a byte is copied.
"""

from collections.abc import Mapping

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from phaseloop.kernels.contract import KernelError, Planned, planned
from phaseloop.kernels.kv import Cache, Kind, plane_shapes
from phaseloop.kernels.repack import LAYOUTS, Packed, from_bf16, layout_of, packed_bytes

from .interface import BackendError, Dimensions, Rope, Weight

Bytes = NDArray[np.uint8]


class MatrixKey(Struct, frozen=True):
    """Rows [first, first + count) of each of a weight's matrices, on a device."""

    device: int
    weight: str
    first: int
    count: int


class Needs:
    """Implements Store with planned arrays, and remembers what was asked for, in order."""

    def __init__(
        self,
        weights: Mapping[str, Weight],
        dimensions: Dimensions,
        *,
        kind: Kind,
        page_count: int,
        cell_count: int,
        unpacked_count: int,
    ) -> None:
        self.weights = weights
        self.dimensions = dimensions
        self.kind: Kind = kind
        self.page_count = page_count
        self.cell_count = cell_count
        self.unpacked_count = unpacked_count
        self.matrices: dict[MatrixKey, Packed] = {}
        self.vectors: dict[tuple[int, str], Planned] = {}
        self.ropes: dict[tuple[int, Rope], Planned] = {}
        self.caches: dict[tuple[int, int], Cache] = {}
        self.unpacks: dict[int, Cache] = {}
        self.state_layers: dict[tuple[int, int], tuple[Planned, Planned]] = {}

    def matrix(self, device: int, weight: str, first: int, count: int) -> Packed:
        key = MatrixKey(device, weight, first, count)
        if key not in self.matrices:
            self.matrices[key] = planned_matrix(self.weights[weight], first, count)
        return self.matrices[key]

    def vector(self, device: int, weight: str) -> Planned:
        found = self.weights[weight]
        if found.kind != "F32":
            raise BackendError(f"{weight}: type {found.kind}, where the CUDA backend takes F32")
        return self.vectors.setdefault((device, weight), planned("f32", *found.shape))

    def frequencies(self, device: int, rope: Rope) -> Planned:
        return self.ropes.setdefault((device, rope), planned("f64", rope.dimensions // 2))

    def cache(self, device: int, layer: int) -> Cache:
        if (device, layer) not in self.caches:
            self.caches[device, layer] = self._planned_cache(self.kind, self.page_count)
        return self.caches[device, layer]

    def unpacked(self, device: int) -> Cache:
        return self.unpacks.setdefault(device, self._planned_cache("F16", self.unpacked_count))

    def states(self, device: int, layer: int) -> tuple[Planned, Planned]:
        shape = self.dimensions.recurrence
        assert shape is not None, "the model's dimensions tell of its delta nets"
        width, cells = shape.width, self.cell_count
        matrices = planned("f32", cells, shape.value_heads, width, width)
        histories = planned("f32", cells, shape.channels, shape.kernel - 1)
        return self.state_layers.setdefault((device, layer), (matrices, histories))

    def _planned_cache(self, kind: Kind, pages: int) -> Cache:
        heads, width = self.dimensions.kv_head_count, self.dimensions.key_length
        shapes = plane_shapes(kind, pages, heads, width)
        return Cache(kind, **{name: planned(kind, *s) for name, (kind, s) in shapes.items()})


def planned_matrix(weight: Weight, first: int, count: int) -> Packed:
    """How rows of a weight lie on a device.  Raises BackendError for what has no kernels."""
    if weight.kind not in (*LAYOUTS, "BF16"):
        known = ", ".join((*LAYOUTS, "BF16"))
        raise BackendError(
            f"{weight.name}: type {weight.kind} has no CUDA kernels, there are some for {known}; "
            "use --device cpu, or quantise the model to one of these"
        )
    columns = weight.shape[-1]
    rows = count * int(np.prod(weight.shape[:-2]))
    kind = stored(weight, first, count)[0] if weight.kind == "BF16" else weight.kind
    try:
        layout_of(kind, rows, columns)
    except KernelError as error:
        raise BackendError(f"{weight.name}: {error}") from error
    return Packed(kind, rows, columns, planned("u8", packed_bytes(kind, rows, columns)))


def stored(weight: Weight, first: int, count: int) -> tuple[str, Bytes]:
    """The type and the bytes of rows of a weight, as they are repacked."""
    rows = weight.shape[-2] if len(weight.shape) > 1 else 1
    data = weight.data.reshape(-1).reshape(-1, rows, weight.data.nbytes // matrix_rows(weight))
    chosen = np.ascontiguousarray(data[:, first : first + count]).reshape(-1)
    return from_bf16(chosen) if weight.kind == "BF16" else (weight.kind, chosen)


def matrix_rows(weight: Weight) -> int:
    return int(np.prod(weight.shape[:-1]))
