"""Merge neighbours, the most wanted pair first: what both kinds of tokenizer do within a word."""

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import TypeVar

S = TypeVar("S")


def merge(symbols: list[S], find: Callable[[S, S], tuple[int, S] | None]) -> list[S]:
    """Merge until no pair can be.

    `find` gives a pair's rank, at least 0, and the symbol it becomes.  The lowest rank goes first,
    and of equals the leftmost.  Takes O(n log n) time for n symbols, whatever they are.
    """
    count = len(symbols)
    row: list[S | None] = [*symbols]  # None once merged into a neighbour
    before = list(range(-1, count - 1))
    after = list(range(1, count + 1))  # `count` is the end
    # A rank and a place in one integer: they compare fast, and in just the order that is wanted.
    queue: list[int] = []
    for place in range(count - 1):
        found = find(symbols[place], symbols[place + 1])
        if found is not None:
            queue.append(found[0] * count + place)
    heapify(queue)
    while queue:
        rank, place = divmod(heappop(queue), count)
        follower = after[place]
        left = row[place]
        right = row[follower] if follower < count else None
        if left is None or right is None:
            continue
        found = find(left, right)
        if found is None or found[0] != rank:  # noted before one of the two was merged
            continue
        joined = found[1]
        row[place] = joined
        row[follower] = None
        end = after[place] = after[follower]
        if end < count:
            before[end] = place
            following = row[end]
            assert following is not None
            found = find(joined, following)
            if found is not None:
                heappush(queue, found[0] * count + place)
        start = before[place]
        if start >= 0:
            preceding = row[start]
            assert preceding is not None
            found = find(preceding, joined)
            if found is not None:
                heappush(queue, found[0] * count + start)
    return [symbol for symbol in row if symbol is not None]
