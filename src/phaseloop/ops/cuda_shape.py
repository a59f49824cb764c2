"""What launches of a pass depend on: its shape, its inputs on each device, and what lies there."""

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from msgspec import Struct

from phaseloop.kernels.contract import Array
from phaseloop.kernels.kv import Cache
from phaseloop.kernels.repack import Packed

from .cuda_program import rows_of
from .interface import Rope, Span

PAGES_STEPS = (4, 16, 64, 256, 1024)  # of a page table: more only if somebody needs more
Group: TypeAlias = tuple[int, int]  # lanes, and rows of each


class PassShape(Struct, frozen=True):
    """`groups` are lanes of equally many rows, in the order of the batch.

    `taken` is how many rows' logits are wanted: None for all, 0 for none.  `pages` is the width of
    the page tables, `unpacked` how many pages of Q8_0 a prompt's lanes have to be unpacked.
    """

    generated: bool
    groups: tuple[Group, ...]
    taken: int | None
    pages: int
    unpacked: int = 0

    @property
    def lane_count(self) -> int:
        return sum(lanes for lanes, _ in self.groups)

    @property
    def row_count(self) -> int:
        return sum(lanes * rows for lanes, rows in self.groups)

    @property
    def count_max(self) -> int:
        return max(rows for _, rows in self.groups)


def groups_of(pieces: Sequence[Span]) -> tuple[Group, ...]:
    groups: list[Group] = []
    for piece in pieces:
        rows = len(piece.tokens)
        if groups and groups[-1][1] == rows:
            groups[-1] = (groups[-1][0] + 1, rows)
        else:
            groups.append((1, rows))
    return tuple(groups)


def table_width(pages: int, pages_max: int) -> int:
    """How many pages a table has room for, so that few graphs serve all lengths."""
    step = next((one for one in PAGES_STEPS if pages <= one), pages_max)
    return min(step, pages_max)


class Inputs(Struct, frozen=True):
    """Of a pass, on one device; all i32.  T rows, L lanes, O wanted rows, U unpacked pages."""

    tokens: Array  # [T]
    positions: Array  # [1, T]
    places: Array  # [T], the same
    lanes: Array  # [T], each row's
    wanted: Array  # [O]
    firsts: Array  # [L], each lane's first row
    starts: Array  # [L], its position
    counts: Array  # [L], its rows
    reads: Array  # [L], cells of recurrent states
    writes: Array  # [L]
    table: Array  # [L, pages]
    table_unpacked: Array  # [L, pages], of the pages' unpacked copies
    pairs: Array  # [U, 2], pages and their copies

    def lane_rows(self, first: int, count: int) -> tuple[Array, Array, Array]:
        """starts, counts and table of some lanes."""
        starts, counts, table = (
            rows_of(array, first, count) for array in (self.starts, self.counts, self.table)
        )
        return starts, counts, table


def input_shapes(shape: PassShape) -> dict[str, tuple[int, ...]]:
    """By the names of Inputs."""
    rows, lanes = shape.row_count, shape.lane_count
    per_lane = ("firsts", "starts", "counts", "reads", "writes")
    return {
        **dict.fromkeys(("tokens", "places", "lanes"), (rows,)),
        "positions": (1, rows),
        "wanted": (shape.taken or 0,),
        **dict.fromkeys(per_lane, (lanes,)),
        "table": (lanes, shape.pages),
        "table_unpacked": (lanes, shape.pages if shape.unpacked else 0),
        "pairs": (shape.unpacked, 2),
    }


class Store(Protocol):
    """What lies on devices for good.  Layers count as Ops.attend and Ops.delta_net count them."""

    def matrix(self, device: int, weight: str, first: int, count: int) -> Packed:
        """Rows [first, first + count) of each of a weight's matrices."""
        ...

    def vector(self, device: int, weight: str) -> Array: ...

    def frequencies(self, device: int, rope: Rope) -> Array: ...

    def cache(self, device: int, layer: int) -> Cache: ...

    def unpacked(self, device: int) -> Cache:
        """Room for pages of F16, of which any layer's may be unpacked."""
        ...

    def states(self, device: int, layer: int) -> tuple[Array, Array]:
        """Matrices [cells, HV, S, S] and histories [cells, C, 3]."""
        ...
