"""Delta debugging: the smallest part of a list and the smallest numbers that still show a fault."""

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


class Exhausted(Exception):
    """The number of tries allowed is spent; what was found so far still shows the fault."""


def minimal_items(items: Sequence[T], shows: Callable[[list[T]], bool]) -> list[T]:
    """A sublist, in order, that shows the fault and of which no single item can be spared.

    `shows(items)` must hold.  Large pieces are dropped first, then halves of them, so that a fault
    which needs few of many items is found in about log steps (after Zeller's ddmin).
    """
    kept = list(items)
    length = len(kept)
    while kept:
        length = min(length, len(kept))
        start, before = 0, len(kept)
        while start < len(kept):
            rest = kept[:start] + kept[start + length :]
            if shows(rest):
                kept = rest
            else:
                start += length
        if len(kept) == before:
            if length == 1:
                break
            length = -(-length // 2)
    return kept


def minimal_number(value: int, floor: int, shows: Callable[[int], bool]) -> int:
    """The smallest number in [floor, value] found by bisection; `shows(value)` must hold.

    Where the fault is not monotone in the number this is a local minimum: one less does not show.
    """
    if value <= floor:
        return value
    if shows(floor):
        return floor
    low, high = floor, value  # low does not show, high does
    while high - low > 1:
        middle = (low + high) // 2
        if shows(middle):
            high = middle
        else:
            low = middle
    return high
