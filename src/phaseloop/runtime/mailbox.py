"""The one input of a live loop.

It has no bound of its own because all who post are bounded: a request can arrive, be cancelled,
match a stop and stall only while its client holds a connection, and the engine has one round and
one seat per slot to report on.  The loop empties it whenever it wakes.
"""

import asyncio
from collections import deque

from phaseloop.core.vocabulary import AnyEvent, DeadlineReached

from .clock import Clock


class Mailbox:
    """Events in the order of their stamps.  Belongs to the event loop's thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._events: deque[AnyEvent] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self.is_closed = False

    @property
    def is_empty(self) -> bool:
        return not self._events

    def post(self, event: AnyEvent) -> None:
        """Never blocks.  After the loop has ended events have no reader and are dropped."""
        if self.is_closed:
            return
        self._events.append(event)
        self._wake()

    async def next(self, deadline_ns: int | None) -> AnyEvent:
        """The next event, or DeadlineReached if the deadline comes strictly before it."""
        while True:
            if self._events:
                if deadline_ns is not None and deadline_ns < self._events[0].at_ns:
                    return DeadlineReached(at_ns=deadline_ns)
                return self._events.popleft()
            if deadline_ns is not None and deadline_ns <= self._clock.now_ns():
                return DeadlineReached(at_ns=deadline_ns)
            await self._wait(deadline_ns)

    def close(self) -> tuple[AnyEvent, ...]:
        """Take nothing more, and hand over what was never read."""
        self.is_closed = True
        rest = tuple(self._events)
        self._events.clear()
        return rest

    async def _wait(self, deadline_ns: int | None) -> None:
        """Until something is posted or the deadline has come; may return early."""
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = None
        if deadline_ns is not None:
            timer = loop.call_later((deadline_ns - self._clock.now_ns()) / 1e9, self._wake)
        try:
            await self._waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
