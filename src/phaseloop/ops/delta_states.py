"""The recurrent states of all regions, each with the position that it belongs to.

Every region has two cells.  A round reads one and writes the other, which becomes the region's own
only when the round has succeeded: so a round that fails or is aborted has changed nothing, and the
state before the last round is still there.  Cell 0 belongs to nobody and is the state before any
token.  Marked states are copies outside the cells, immutable, shared by whoever has use for them.

Layout, per layer: matrices [cell][HV][S][S], and the convolution's rows [cell][C][K - 1].
"""

import mmap
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import DTypeLike, NDArray

from .interface import BackendError, Recurrence, Region, Span, State

Values = NDArray[Any]
ALIGNMENT = 64  # bytes, of each plane
ZERO_CELL = 0
CELLS_PER_REGION = 2
NO_SHIFT = (
    "this model has recurrent states, from which nothing can be dropped: use a larger context "
    "instead of context shift"
)
NEWEST_KEPT = 3  # marks that thinning spares: a prompt's end, just before it, its last message
MARKS_MAX = 32  # of a region, by default


class Course(Struct, frozen=True):
    """What a region has: the state after `position` tokens in `cell`, the one before in `spare`."""

    cell: int
    spare: int
    position: int | None = 0  # None: the region was cut where there is no state
    previous: int | None = None  # position of the spare cell's state, if it still belongs here
    marked: tuple[State, ...] = ()  # ascending


class Leg(Struct, frozen=True):
    """How far a round is with one region."""

    course: Course
    start: int
    end: int
    read: int  # cells
    write: int
    marked: tuple[State, ...] = ()


class Courses(ABC):
    """Which cells have which states; the cells themselves are a subclass's.

    `marks_max` bounds the marked states of a region; at least the newest three are kept.
    """

    state_bytes: int

    def __init__(self, *, region_count: int, marks_max: int = MARKS_MAX) -> None:
        self._marks_max = max(marks_max, NEWEST_KEPT)
        firsts = range(1, cell_count(region_count), CELLS_PER_REGION)
        self._courses = [Course(cell=first, spare=first + 1) for first in firsts]

    def positions(self, region: Region) -> tuple[int, ...]:
        """As Backend.positions: a course is replaced, never altered, so any thread may look."""
        course = self._courses[region]
        found = {state.position for state in course.marked} | {course.position, course.previous}
        return tuple(sorted(position for position in found if position))

    # --- a round ----------------------------------------------------------------------------------

    def begin(self, spans: Sequence[Span]) -> dict[Region, Leg]:
        """Raises BackendError unless every lane goes on from the state that its region is at."""
        for span in spans:
            if span.start and span.start != self._courses[span.region].position:
                raise BackendError(
                    f"KV region {span.region}: there is no recurrent state after {span.start} "
                    f"tokens, only after {self.positions(span.region) or 'none'}"
                )
        legs: dict[Region, Leg] = {}
        for span in spans:
            course = self._courses[span.region]
            # What the spare cell held is written over, however the round ends.
            course = self._courses[span.region] = replace(course, previous=None)
            read = course.cell if span.start else ZERO_CELL
            legs[span.region] = Leg(course, span.start, span.start, read, course.spare)
        return legs

    def passed(self, legs: dict[Region, Leg], pieces: Sequence[Span]) -> None:
        """A pass has written the states of its pieces' ends; keep those that are marked."""
        for piece in pieces:
            leg = legs[piece.region]
            end = piece.start + len(piece.tokens)
            marked = leg.marked
            if end in piece.marks:
                marked += (self._state(leg.write, end),)
            legs[piece.region] = replace(leg, end=end, read=leg.write, marked=marked)

    def commit(self, legs: dict[Region, Leg]) -> None:
        for region, leg in legs.items():
            course = leg.course
            before = [state for state in course.marked if state.position <= leg.start]
            self._courses[region] = Course(
                cell=course.spare,
                spare=course.cell,
                position=leg.end,
                previous=leg.start if leg.start == course.position else None,
                marked=thinned((*before, *leg.marked), self._marks_max),
            )

    # --- whole sequences --------------------------------------------------------------------------

    def truncate(self, region: Region, length: int) -> None:
        """Back to `length` tokens, if the region has a state there; else only to earlier ones."""
        course = self._courses[region]
        if course.position is not None and course.position <= length:
            return
        marked = tuple(state for state in course.marked if state.position <= length)
        course = replace(course, marked=marked)
        if course.previous == length:
            course = replace(
                course,
                cell=course.spare,
                spare=course.cell,
                position=course.previous,
                previous=None,
            )
        elif length == 0:
            course = replace(course, position=0, previous=None)
        elif marked and marked[-1].position == length:
            self._load(course.cell, marked[-1])
            course = replace(course, position=length, previous=None)
        else:
            is_earlier = course.previous is not None and course.previous < length
            course = replace(
                course, position=None, previous=course.previous if is_earlier else None
            )
        self._courses[region] = course

    def save(self, region: Region, length: int) -> tuple[State, ...]:
        """The marked states up to `length`, and that of `length` itself if the region has it."""
        course = self._courses[region]
        states = tuple(state for state in course.marked if state.position <= length)
        if not length or (states and states[-1].position == length):
            return states
        for position, cell in ((course.position, course.cell), (course.previous, course.spare)):
            if position == length:
                return (*states, self._state(cell, length))
        return states

    def restore(self, region: Region, states: tuple[State, ...], length: int) -> None:
        course = self._courses[region]
        position = 0 if length == 0 else None
        if states and states[-1].position == length:
            self._load(course.cell, states[-1])
            position = length
        self._courses[region] = Course(course.cell, course.spare, position, None, states)

    @abstractmethod
    def _state(self, cell: int, position: int) -> State:
        """A copy of a cell, which is the state after `position` tokens."""

    @abstractmethod
    def _load(self, cell: int, state: State) -> None:
        """Make a cell hold a state."""


class States(Courses):
    """Whose cells are NumPy's arrays."""

    def __init__(
        self,
        shape: Recurrence,
        dtype: DTypeLike,
        *,
        region_count: int,
        marks_max: int = MARKS_MAX,
    ) -> None:
        super().__init__(region_count=region_count, marks_max=marks_max)
        cells, width = cell_count(region_count), shape.width
        per_layer = ((shape.value_heads, width, width), (shape.channels, shape.kernel - 1))
        shapes = [(cells, *axes) for axes in per_layer for _ in range(shape.layer_count)]
        planes = allocate(shapes, np.dtype(dtype))
        self._planes = planes
        self.matrices = planes[: shape.layer_count]
        self.histories = planes[shape.layer_count :]
        self.state_bytes = sum(plane[ZERO_CELL].nbytes for plane in planes)

    def _state(self, cell: int, position: int) -> State:
        parts = (plane[cell].reshape(-1).view(np.uint8).copy() for plane in self._planes)
        return State(position, tuple(parts))

    def _load(self, cell: int, state: State) -> None:
        for plane, part in zip(self._planes, state.parts, strict=True):
            plane[cell].reshape(-1).view(np.uint8)[:] = part


def cell_count(region_count: int) -> int:
    return 1 + CELLS_PER_REGION * region_count


def thinned(states: tuple[State, ...], count: int) -> tuple[State, ...]:
    """At most `count` states: those go whose neighbours are closest, the newest stay."""
    kept = list(states)
    while len(kept) > count:
        positions = [0, *(state.position for state in kept)]
        spared = len(kept) - NEWEST_KEPT
        gaps = [positions[index + 2] - positions[index] for index in range(spared)]
        del kept[gaps.index(min(gaps))]
    return tuple(kept)


def allocate(shapes: Sequence[tuple[int, ...]], dtype: "np.dtype[Any]") -> list[Values]:
    """Zeroed arrays that cost memory only where they are written."""
    sizes = [int(np.prod(shape)) * dtype.itemsize for shape in shapes]
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
    try:
        memory = np.frombuffer(mmap.mmap(-1, offsets[-1]), np.uint8)
    except (OSError, OverflowError, ValueError) as error:
        raise BackendError(
            f"cannot reserve {offsets[-1]} bytes for recurrent states: {error}; lower the number "
            "of slots"
        ) from error
    return [
        memory[offset : offset + size].view(dtype).reshape(shape)
        for offset, size, shape in zip(offsets[:-1], sizes, shapes, strict=True)
    ]
