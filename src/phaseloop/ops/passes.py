"""Cuts the lanes of a round into passes, each at most a ubatch of rows.

A pass leaves one recurrent state per lane; so where one is marked inside a lane, its pass ends.
"""

from collections.abc import Sequence

from msgspec import Struct

from .interface import Span


class Pass(Struct, frozen=True):
    """Pieces of lanes that share one graph run; `lanes` says whose each piece is."""

    pieces: tuple[Span, ...]
    lanes: tuple[int, ...]


def cut(spans: Sequence[Span], rows_max: int, *, apart: bool, whole: bool = False) -> list[Pass]:
    """Every lane's rows in order, in passes of at most `rows_max` rows.

    `apart`: generated rows and prompts' rows share no pass.  `whole`: no lane is cut, even if it
    has more rows than that.  Within a pass, pieces are in order of their regions, so that
    neighbours can be attended together.
    """
    numbered = sorted(enumerate(spans), key=lambda item: item[1].region)
    if whole:
        return fill_whole(numbered, rows_max)
    if not apart:
        return fill(numbered, rows_max)
    generated = [item for item in numbered if item[1].generated]
    prompts = [item for item in numbered if not item[1].generated]
    return fill(generated, rows_max) + fill(prompts, rows_max)


def fill(numbered: Sequence[tuple[int, Span]], rows_max: int) -> list[Pass]:
    passes: list[Pass] = []
    pieces: list[Span] = []
    lanes: list[int] = []
    room = rows_max
    for lane, span in numbered:
        taken, count = 0, len(span.tokens)
        while taken < count:
            size = min(room, next_mark(span, taken) - taken)
            pieces.append(piece(span, taken, taken + size))
            lanes.append(lane)
            taken, room = taken + size, room - size
            if room == 0 or taken < count:
                passes.append(Pass(tuple(pieces), tuple(lanes)))
                pieces, lanes, room = [], [], rows_max
    if pieces:
        passes.append(Pass(tuple(pieces), tuple(lanes)))
    return passes


def fill_whole(numbered: Sequence[tuple[int, Span]], rows_max: int) -> list[Pass]:
    passes: list[list[tuple[int, Span]]] = []
    room = 0
    for lane, span in numbered:
        count = len(span.tokens)
        if not passes or count > room:
            passes.append([])
            room = rows_max
        passes[-1].append((lane, span))
        room -= count
    return [Pass(tuple(span for _, span in one), tuple(lane for lane, _ in one)) for one in passes]


def next_mark(span: Span, taken: int) -> int:
    """How many rows the span has up to its first mark after `taken` of them, or in all."""
    later = (mark - span.start for mark in span.marks if mark > span.start + taken)
    return min(len(span.tokens), next(later, len(span.tokens)))


def piece(span: Span, start: int, stop: int) -> Span:
    count = len(span.tokens)
    if start == 0 and stop == count:
        return span
    return Span(
        region=span.region,
        start=span.start + start,
        tokens=span.tokens[start:stop],
        outputs=max(0, stop - max(start, count - span.outputs)),
        generated=span.generated,
        marks=span.marks,
        adapters=span.adapters,
        given=None if span.given is None else span.given[start:stop],
    )
