"""Memory and content for launches that were planned with nothing behind them."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from phaseloop.kernels.contract import Array, Launch, Operand, planned
from phaseloop.kernels.cupy_device import CupyDevice
from phaseloop.kernels.device import part
from phaseloop.kernels.kv import PAGE

ALIGNED = 256  # bytes, of each operand
BLOCK_BYTES = 16 << 20  # of random content, repeated over larger operands


def with_two_states(launch: Launch) -> Launch:
    """A delta net reads its state from one cell and writes it to another; floors count one."""
    arguments = tuple(
        replace(one, array=planned("f32", 2, *one.array.shape[1:]))
        if isinstance(one, Operand) and one.name == "states" and one.array is not None
        else one
        for one in launch.arguments
    )
    return replace(launch, arguments=arguments)


def arrays_of(launch: Launch) -> Iterator[tuple[str, Array]]:
    """By name, each array once, though it may be several operands."""
    found: dict[int, tuple[str, Array]] = {}
    for argument in launch.arguments:
        if isinstance(argument, Operand) and argument.array is not None:
            found.setdefault(id(argument.array), (argument.name, argument.array))
    yield from found.values()


def rounded(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def operand_bytes(launch: Launch) -> int:
    return sum(rounded(array.nbytes) for _, array in arrays_of(launch))


def integers(launch: Launch) -> dict[str, NDArray[Any]]:
    """What operands of type i32 have to hold: the last rows of a sequence that fills its pages."""
    shapes = {name: array.shape for name, array in arrays_of(launch)}
    first = next(iter(shapes.values()))
    rows = first[1] if launch.source == "attention_decode" else first[0]
    held = {"firsts": 0, "counts": rows, "reads": 0, "writes": 1}
    found = {name: np.full(shapes[name], value) for name, value in held.items() if name in shapes}
    if "table" in shapes:
        lanes, pages = shapes["table"]
        found["table"] = np.arange(lanes * pages).reshape(lanes, pages)
        found["starts"] = np.full(lanes, pages * PAGE - rows)
    return found


class Filler:
    """Random content for arrays of a device: normal floats, and bits for whatever else."""

    def __init__(self, device: CupyDevice) -> None:
        rng = np.random.default_rng(0)
        floats = rng.standard_normal(BLOCK_BYTES // 4, np.float32)
        bits = rng.integers(0, 256, BLOCK_BYTES, dtype=np.uint8)
        self._device = device
        self._blocks: dict[str, Array] = {}
        for content in (np.tile(floats.astype(np.float16), 2), floats, bits):
            block = device.allocate((BLOCK_BYTES,), np.uint8)
            device.upload(content, block)
            self._blocks[str(content.dtype)] = block

    def fill(self, array: Array) -> None:
        block, anything = self._blocks.get(str(array.dtype), self._blocks["uint8"]), bytes_of(array)
        for begin in range(0, array.nbytes, BLOCK_BYTES):
            size = (min(BLOCK_BYTES, array.nbytes - begin),)
            self._device.copy(part(block, 0, size, np.uint8), part(anything, begin, size, np.uint8))

    def place(self, launch: Launch, arena: Array, offset: int) -> Launch:
        """The launch with its operands in a u8 arena from byte `offset` on, filled."""
        numbers = integers(launch)
        places: dict[int, Array] = {}
        for name, array in arrays_of(launch):
            places[id(array)] = place = part(arena, offset, array.shape, array.dtype)
            offset += rounded(array.nbytes)
            if name in numbers:
                self._device.upload(numbers[name].astype(array.dtype), place)
            else:
                self.fill(place)
        arguments = tuple(
            replace(one, array=places[id(one.array)])
            if isinstance(one, Operand) and one.array is not None
            else one
            for one in launch.arguments
        )
        return replace(launch, arguments=arguments)


def bytes_of(array: Array) -> Array:
    whole: Any = array
    return whole.reshape(-1).view(np.uint8)
