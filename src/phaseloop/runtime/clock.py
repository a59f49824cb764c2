"""Two clocks: one that passes, one that jumps.

Times are integers of nanoseconds since the clock was made, which is when the server started.
"""

import heapq
import time
from collections.abc import Callable
from typing import Protocol, TypeAlias

from phaseloop.core.vocabulary import AnyEvent


class Clock(Protocol):
    def now_ns(self) -> int:
        """Never decreases."""
        ...


class AsyncioClock:
    """The machine's monotonic clock, from zero.  May be read from any thread."""

    def __init__(self, monotonic_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._monotonic_ns = monotonic_ns
        self._start_ns = monotonic_ns()

    def now_ns(self) -> int:
        return self._monotonic_ns() - self._start_ns


Callback: TypeAlias = Callable[[], AnyEvent | None]  # may answer with an event for the loop
Ticket: TypeAlias = int


class VirtualClock:
    """Time that jumps to whatever comes next: events for the loop and callbacks of the world.

    What is due at the same time comes in the order in which it was scheduled.
    """

    def __init__(self) -> None:
        self._now_ns = 0
        self._ticket_next: Ticket = 0
        self._heap: list[tuple[int, Ticket, AnyEvent | Callback]] = []
        self._cancelled: set[Ticket] = set()

    def now_ns(self) -> int:
        return self._now_ns

    def post(self, event: AnyEvent) -> Ticket:
        """Schedule an event for its own time, which may not be past."""
        return self._schedule(event.at_ns, event)

    def call_at(self, at_ns: int, callback: Callback) -> Ticket:
        return self._schedule(at_ns, callback)

    def cancel(self, ticket: Ticket) -> None:
        """Take back what is still scheduled."""
        self._cancelled.add(ticket)
        self._drop_cancelled()

    def next_ns(self) -> int | None:
        """When the next item is due; None if nothing is scheduled."""
        return self._heap[0][0] if self._heap else None

    def pop(self) -> AnyEvent | Callback:
        """Jump to the next item, which must exist, and take it."""
        self._now_ns, _, item = heapq.heappop(self._heap)
        if self._cancelled:
            self._drop_cancelled()
        return item

    def advance(self, to_ns: int) -> None:
        """Jump to a time that is neither past nor later than the next item."""
        assert self._now_ns <= to_ns, f"{to_ns} ns is past, it is {self._now_ns} ns"
        self._now_ns = to_ns

    def _schedule(self, at_ns: int, item: AnyEvent | Callback) -> Ticket:
        assert self._now_ns <= at_ns, f"{at_ns} ns is past, it is {self._now_ns} ns"
        ticket = self._ticket_next
        self._ticket_next += 1
        heapq.heappush(self._heap, (at_ns, ticket, item))
        return ticket

    def _drop_cancelled(self) -> None:
        """Keep the first entry of the heap one that counts."""
        while self._heap and self._heap[0][1] in self._cancelled:
            self._cancelled.remove(heapq.heappop(self._heap)[1])
