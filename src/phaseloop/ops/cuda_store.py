"""What lies on devices as long as a model is loaded: matrices repacked, vectors, caches, states."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phaseloop.kernels import repack
from phaseloop.kernels.contract import Array, KernelError, Planned
from phaseloop.kernels.device import Device, part
from phaseloop.kernels.kv import Cache
from phaseloop.kernels.ranges import check_values
from phaseloop.kernels.repack import Packed

from .cuda_needs import MatrixKey, Needs, stored
from .cuda_program import aligned
from .interface import BackendError, Rope, Weight
from .reference import unpack
from .rope import angles

Progress = Callable[[int, int], None]  # bytes done, bytes in all
CACHE_PLANES = ("keys", "values", "key_scales", "value_scales")


class Block:
    """One allocation, cut into arrays one after the other."""

    def __init__(self, device: Device, size: int) -> None:
        self._device = device
        self._array = device.allocate((max(1, size),), np.uint8)
        self._end = 0

    def zero(self) -> None:
        self._device.zero(self._array)

    def take(self, wanted: Array) -> Array:
        found = part(self._array, self._end, wanted.shape, wanted.dtype)
        self._end += aligned(wanted.nbytes)
        return found


class Placed:
    """Implements Store: all that `needs` has noted, allocated and filled."""

    def __init__(
        self,
        devices: Sequence[Device],
        needs: Needs,
        progress: Progress = lambda done, total: None,
    ) -> None:
        self._devices = devices
        self._needs = needs
        self._matrices: dict[MatrixKey, Packed] = {}
        self._vectors: dict[tuple[int, str], Array] = {}
        self._frequencies: dict[tuple[int, Rope], Array] = {}
        self.caches: dict[tuple[int, int], Cache] = {}
        self._unpacks: dict[int, Cache] = {}
        self.state_planes: dict[tuple[int, int], tuple[Array, Array]] = {}
        total = sum(self._constant_bytes(device) for device in range(len(devices)))
        done = 0
        for index, device in enumerate(devices):
            for size in self._place_constants(index, device):
                done += size
                progress(done, total)
        for index, device in enumerate(devices):
            self._place_caches(index, device)

    def matrix(self, device: int, weight: str, first: int, count: int) -> Packed:
        return self._matrices[MatrixKey(device, weight, first, count)]

    def vector(self, device: int, weight: str) -> Array:
        return self._vectors[device, weight]

    def frequencies(self, device: int, rope: Rope) -> Array:
        return self._frequencies[device, rope]

    def cache(self, device: int, layer: int) -> Cache:
        return self.caches[device, layer]

    def unpacked(self, device: int) -> Cache:
        return self._unpacks[device]

    def states(self, device: int, layer: int) -> tuple[Array, Array]:
        return self.state_planes[device, layer]

    # --- at load ----------------------------------------------------------------------------------

    def _constant_bytes(self, index: int) -> int:
        return constant_bytes(self._needs, index)

    def _place_constants(self, index: int, device: Device) -> Iterator[int]:
        needs = self._needs
        block = Block(device, self._constant_bytes(index))
        vectors = {key: one for key, one in needs.vectors.items() if key[0] == index}
        for key, wanted in vectors.items():
            array = self._vectors[key] = block.take(wanted)
            device.upload(needs.weights[key[1]].data.reshape(-1), array)
        for key, wanted in needs.ropes.items():
            if key[0] == index:
                array = self._frequencies[key] = block.take(wanted)
                device.upload(self._radians(key[1]), array)
        matrices = {key: one for key, one in needs.matrices.items() if key.device == index}
        packer = Packer(device, needs, list(matrices))
        for key, wanted in matrices.items():
            check(needs.weights[key.weight])
            packed = Packed(wanted.kind, wanted.rows, wanted.columns, block.take(wanted.data))
            packer.pack(key, packed)
            self._matrices[key] = packed
            yield aligned(wanted.data.nbytes)
        packer.close()

    def _radians(self, rope: Rope) -> NDArray[np.float64]:
        factors = unpack(self._needs.weights[rope.factors]) if rope.factors else None
        return angles(rope, factors, np.ones(1, np.int64))[0]

    def _place_caches(self, index: int, device: Device) -> None:
        needs = self._needs
        block = Block(device, cache_bytes(needs, index) + state_bytes(needs, index))
        block.zero()  # pages are read as wholes, and cell 0 is the state before any token
        for key, cache in needs.caches.items():
            if key[0] == index:
                self.caches[key] = placed_cache(block, cache)
        if index in needs.unpacks:
            self._unpacks[index] = placed_cache(block, needs.unpacks[index])
        for key, planes in needs.state_layers.items():
            if key[0] == index:
                self.state_planes[key] = block.take(planes[0]), block.take(planes[1])


def check(weight: Weight) -> None:
    """Raises BackendError for what kernels cannot hold, though the file is valid."""
    try:
        check_values(weight.name, weight.kind, weight.shape[-1], weight.data.reshape(-1))
    except KernelError as error:
        raise BackendError(str(error)) from error


class Packer:
    """Repacks matrices on a device, through memory that is given back."""

    def __init__(self, device: Device, needs: Needs, keys: Sequence[MatrixKey]) -> None:
        self._device, self._needs = device, needs
        self._table_kind = ""
        sizes = [raw_bytes(needs, key) for key in keys]
        tables = [16 * repack.LAYOUTS[needs.matrices[key].kind].block_bytes for key in keys]
        self._raw = device.allocate((max(sizes, default=1),), np.uint8)
        self._table = device.allocate((max(tables, default=1),), np.uint8)

    def pack(self, key: MatrixKey, packed: Packed) -> None:
        device = self._device
        kind, data = stored(self._needs.weights[key.weight], key.first, key.count)
        assert kind == packed.kind
        raw = part(self._raw, 0, (data.nbytes,), np.uint8)
        table = part(self._table, 0, (8 * packed.layout.block_bytes,), np.uint16)
        if kind != self._table_kind:
            device.upload(repack.sources(kind).astype(np.uint16), table)
            self._table_kind = kind
        device.upload(data, raw)
        device.zero(packed.data)  # what fills up rows and words
        device.run(repack.repack(raw, table, packed))

    def close(self) -> None:
        for array in (self._raw, self._table):
            self._device.release(array)


def raw_bytes(needs: Needs, key: MatrixKey) -> int:
    packed = needs.matrices[key]
    layout = packed.layout
    return packed.rows * (packed.columns // layout.block) * layout.block_bytes


def placed_cache(block: Block, cache: Cache) -> Cache:
    planes = {name: block.take(one) for name, one in planes_of(cache).items()}
    return Cache(
        cache.kind,
        planes["keys"],
        planes["values"],
        planes.get("key_scales"),
        planes.get("value_scales"),
    )


def planes_of(cache: Cache) -> dict[str, Array]:
    """The arrays that a cache has, by name."""
    named = {name: getattr(cache, name) for name in CACHE_PLANES}
    return {name: one for name, one in named.items() if one is not None}


def cell_of(plane: Array, cell: int) -> Array:
    """One sequence's part of an array of states, or a page of an array of a cache."""
    whole: Any = plane
    return whole[cell]


# --- how many bytes ------------------------------------------------------------------------------


def constant_bytes(needs: Needs, device: int) -> int:
    """Weights as they are repacked, and frequencies."""
    arrays: list[Planned | Array] = [
        one.data for key, one in needs.matrices.items() if key.device == device
    ]
    arrays += [one for key, one in needs.vectors.items() if key[0] == device]
    arrays += [one for key, one in needs.ropes.items() if key[0] == device]
    return sum(aligned(one.nbytes) for one in arrays)


def cache_bytes(needs: Needs, device: int) -> int:
    caches = [one for key, one in needs.caches.items() if key[0] == device]
    caches += [one for key, one in needs.unpacks.items() if key == device]
    return sum(aligned(one.nbytes) for cache in caches for one in planes_of(cache).values())


def state_bytes(needs: Needs, device: int) -> int:
    layers = [planes for key, planes in needs.state_layers.items() if key[0] == device]
    return sum(aligned(one.nbytes) for planes in layers for one in planes)
