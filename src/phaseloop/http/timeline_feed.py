"""The timeline for those who watch it: one recorder while there are any, none otherwise.

Several times a second what was recorded is encoded once and put to every viewer.  A viewer that
does not keep up loses what it has not read; it is told of the gap, and how everything stands now.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Self

import msgspec
import structlog
from msgspec.structs import replace

from phaseloop.core.state import State
from phaseloop.core.vocabulary import AnyEvent, Effects
from phaseloop.runtime.service import Service
from phaseloop.runtime.timeline import Batch, Recorder, head_of

TICK_S = 0.1
QUIET_TICKS_MAX = 10  # then the time is told, although nothing else has changed
BATCHES_MAX = 50  # that one viewer has not read yet
VIEWERS_MAX = 16

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class Crowded(Exception):
    """As many watch already as may."""


class Viewer:
    """Iterate it from one task; the first batch has a head."""

    def __init__(self, stand: Callable[[], Batch]) -> None:
        """`stand` tells how everything is; whatever was put before is then known."""
        self._stand = stand
        self._batches: deque[bytes] = deque()
        self._has_begun = False
        self._has_missed = True
        self._is_over = False
        self._changed = asyncio.Event()

    def put(self, batch: bytes) -> None:
        if self._has_missed:
            return
        if len(self._batches) < BATCHES_MAX:
            self._batches.append(batch)
        else:
            self.miss()
        self._changed.set()

    def miss(self) -> None:
        """It will be told everything anew."""
        self._batches.clear()
        self._has_missed = True
        self._changed.set()

    def end(self) -> None:
        self._is_over = True
        self._changed.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        while not (self._batches or self._has_missed or self._is_over):
            self._changed.clear()
            await self._changed.wait()
        if self._is_over:
            raise StopAsyncIteration
        if not self._has_missed:
            return self._batches.popleft()
        batch = replace(self._stand(), gap=self._has_begun)
        self._batches.clear()
        self._has_missed, self._has_begun = False, True
        return msgspec.json.encode(batch)


class Feed:
    """One application's.  Belongs to the event loop's thread."""

    def __init__(self, tick_s: float = TICK_S) -> None:
        self._tick_s = tick_s
        self._broadcast: Broadcast | None = None

    @property
    def is_recording(self) -> bool:
        return self._broadcast is not None

    @contextmanager
    def watched(self, service: Service, started: int) -> Generator[Viewer]:
        """Within, the viewer is told what happens; it ends with the service.  Raises Crowded."""
        if self._broadcast is None:
            self._broadcast = Broadcast(service, started, self._tick_s)
        broadcast = self._broadcast
        viewer = broadcast.join()
        try:
            yield viewer
        finally:
            if broadcast.leave(viewer) == 0:
                broadcast.close()
                self._broadcast = None


class Broadcast:
    """A recorder at work, from the first viewer's coming to the last one's going."""

    def __init__(self, service: Service, started: int, tick_s: float) -> None:
        self._service = service
        self._started = started
        self._viewers: list[Viewer] = []
        self._recorder = Recorder(service.state, service.clock.now_ns())
        self._has_failed = False
        self._exits = ExitStack()
        self._exits.enter_context(service.observed(self._observe))
        ticking = asyncio.create_task(self._tick(tick_s), name="phaseloop-timeline")
        self._exits.callback(ticking.cancel)

    def close(self) -> None:
        self._exits.close()

    def join(self) -> Viewer:
        if len(self._viewers) == VIEWERS_MAX:
            raise Crowded
        viewer = Viewer(self._stand)
        self._viewers.append(viewer)
        if self._service.has_ended or self._has_failed:
            viewer.end()
        return viewer

    def leave(self, viewer: Viewer) -> int:
        """How many are left."""
        self._viewers.remove(viewer)
        return len(self._viewers)

    def _observe(self, event: AnyEvent, before: State, after: State, effects: Effects) -> None:
        """A fault in showing what happens must not keep it from happening."""
        if self._has_failed:
            return
        try:
            self._recorder.observe(event, before, after, effects)
        except Exception:
            log.exception("the timeline's recorder failed; who watches is let go")
            self._has_failed = True
            for viewer in self._viewers:
                viewer.end()

    def _stand(self) -> Batch:
        self._flush()  # so that nobody is told twice
        now_ns = self._service.clock.now_ns()
        records = self._recorder.standing(now_ns)
        return Batch(now_ns, records, head_of(self._service.state, "live", self._started))

    def _flush(self, *, tells_time: bool = False) -> bool:
        """Whether there was anything to tell."""
        now_ns = self._service.clock.now_ns()
        records = self._recorder.take(now_ns)
        if self._recorder.has_overflowed:
            for viewer in self._viewers:
                viewer.miss()
            return True
        if not records and not tells_time:
            return False
        batch = msgspec.json.encode(Batch(now_ns, records))
        for viewer in self._viewers:
            viewer.put(batch)
        return True

    async def _tick(self, tick_s: float) -> None:
        quiet = 0
        while not self._service.has_ended:
            await asyncio.sleep(tick_s)
            quiet += 1
            if self._flush(tells_time=quiet == QUIET_TICKS_MAX):
                quiet = 0
        for viewer in self._viewers:
            viewer.end()
