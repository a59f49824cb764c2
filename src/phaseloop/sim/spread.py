"""Percentiles of a stream of waits, in bounded memory.

A percentile is the nearest rank: of n sorted values, the one at position ceil(p/100 * n), counted
from 1.  So it is always a value that occurred, and p100 is the maximum.
"""

from array import array
from bisect import bisect_left
from itertools import accumulate

from msgspec import Struct

NS = 1_000_000_000
EXACT_COUNT_MAX = 1 << 16
KEPT_BITS = 12


class Percentiles(Struct, frozen=True):
    """Seconds; None where there was nothing to measure."""

    p50: float | None
    p95: float | None
    p99: float | None
    max: float | None


class Spread:
    """Collects non-negative integers of nanoseconds.

    The first 65,536 values are kept as they are.  From then on values are kept to 12 binary digits
    (relative error below 0.05 %), so that any number of them fits into some hundred kilobytes;
    count, sum and maximum stay exact.
    """

    __slots__ = ("_buckets", "_exact", "count", "max", "sum")

    def __init__(self) -> None:
        self.count = 0
        self.sum = 0
        self.max = 0
        self._exact: array[int] | None = array("q")
        self._buckets: dict[int, int] = {}

    def add(self, value: int, times: int = 1) -> None:
        self.count += times
        self.sum += value * times
        if value > self.max:
            self.max = value
        exact = self._exact
        if exact is not None and self.count <= EXACT_COUNT_MAX:
            exact.extend((value,) * times)
            return
        if exact is not None:
            self._exact = None
            for kept in exact:
                self._count(kept, 1)
        self._count(value, times)

    def _count(self, value: int, times: int) -> None:
        rounded = round_down(value)
        self._buckets[rounded] = self._buckets.get(rounded, 0) + times

    def copy(self) -> "Spread":
        twin = Spread()
        twin.count, twin.sum, twin.max = self.count, self.sum, self.max
        twin._exact = None if self._exact is None else self._exact[:]
        twin._buckets = dict(self._buckets)
        return twin

    def ranks(self, *percents: int) -> tuple[int, ...]:
        """The values at these percents (1..100), in nanoseconds; at least one value was added."""
        positions = [max(1, -(-percent * self.count // 100)) for percent in percents]
        if self._exact is not None:
            ordered = sorted(self._exact)
            return tuple(ordered[position - 1] for position in positions)
        values = sorted(self._buckets)
        reached = list(accumulate(self._buckets[value] for value in values))
        found = (values[bisect_left(reached, position)] for position in positions)
        return tuple(
            self.max if position == self.count else value
            for position, value in zip(positions, found, strict=True)
        )

    def percentiles(self) -> Percentiles:
        if not self.count:
            return Percentiles(None, None, None, None)
        p50, p95, p99 = self.ranks(50, 95, 99)
        return Percentiles(p50 / NS, p95 / NS, p99 / NS, self.max / NS)


def round_down(value: int) -> int:
    """The value with all but its leading 12 binary digits cleared."""
    dropped = value.bit_length() - KEPT_BITS
    return value if dropped <= 0 else value >> dropped << dropped
