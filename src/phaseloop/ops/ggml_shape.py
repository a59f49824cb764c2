"""What the graph of a batch depends on, and what it has to be filled in."""

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from .ggml_delta import NODES_PER_RUN, StateInputs
from .ggml_openmp import ggml
from .interface import AdapterList, Dimensions

TILE_ROWS = 64  # from this many query rows on, ggml's flash attention works in tiles
VIEW_NODES_PER_ATTENTION = 16
NODES_PER_LAYER = 128


class Group(Struct, frozen=True):
    """`lanes` lanes in neighbouring regions, of `rows` rows each, that attend in one op."""

    region: int
    lanes: int
    rows: int
    seen: int  # positions the op looks at, masked where a row must not; a multiple of 256

    def padded_rows(self, tile: bool) -> int:
        return max(self.rows, TILE_ROWS) if tile else self.rows


class Shape(Struct, frozen=True):
    """All that the structure of a graph depends on."""

    groups: tuple[Group, ...]
    row_count: int
    output_count: int
    tile: bool  # fill up query rows, so that attention always takes the tiled path
    row_by_row: bool  # attention takes each row by itself
    adapters: AdapterList = ()
    has_given: bool = False  # rows come along with the tokens
    shows_hidden: bool = False

    @property
    def lane_rows(self) -> list[int]:
        return [group.rows for group in self.groups for _ in range(group.lanes)]


class MaskInput(Struct, frozen=True):
    group: int
    window: int | None
    causal: bool
    values: NDArray[np.uint16]  # F16 bits [lanes, padded rows, seen]


class Built(Struct, frozen=True):
    """A graph with its memory: fill in the inputs, compute, read the logits and hidden rows."""

    graph: ggml.ggml_cgraph_p
    tokens: NDArray[np.int32]
    positions: NDArray[np.int32]
    cells: NDArray[np.int64]
    outputs: NDArray[np.int32] | None
    masks: tuple[MaskInput, ...]
    states: StateInputs | None
    given: NDArray[np.float32] | None  # [rows, width]
    hidden: tuple[NDArray[np.float32], ...]  # [rows, width] each, in the order of the taps
    logits: NDArray[np.float32]


def node_count_max(dimensions: Dimensions, shape: Shape, expert_count: int) -> int:
    groups = len(shape.groups) * VIEW_NODES_PER_ATTENTION
    attending = len(dimensions.ropes) * (NODES_PER_LAYER + groups + 4 * expert_count)
    if dimensions.recurrence is None:
        return 64 + attending
    runs = len(shape.groups) * NODES_PER_RUN
    layer_nodes = NODES_PER_LAYER + runs + 4 * expert_count
    return 64 + attending + dimensions.recurrence.layer_count * layer_nodes
