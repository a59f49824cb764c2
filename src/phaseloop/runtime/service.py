"""One engine being served: loop, worker, gateway, watch and trace, put together and taken apart.

    async with Service(engine, ...) as service:     # starts the engine's thread and the loop
        with service.gateway.submit([...]) as call: ...
        stop = await service.ended()                # or leave the block, which ends it at once

Everything here belongs to the event loop's thread.
"""

import asyncio
import secrets
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import BinaryIO, Self

from msgspec import Struct

from phaseloop.core.state import Limits, State, initial
from phaseloop.core.vocabulary import (
    AnyEvent,
    Effects,
    Policy,
    PolicyChanged,
    ShutdownRequested,
    SlotIndex,
    Stop,
)
from phaseloop.engine.protocol import Description, Engine
from phaseloop.engine.settings import Adapters

from .clock import AsyncioClock, Clock
from .contents import Contents
from .gateway import SEED_BITS, Gateway
from .loop import EXIT_FAULT, Observe, Stepper, run
from .mailbox import Mailbox
from .perform import Performer
from .prefixes import Prefixes
from .trace import Header, TraceWriter
from .watch import Watch
from .worker import ThreadWorker

WORKER_CLOSE_S = 1.0  # an engine that does not end within is left behind


class Recording(Struct, frozen=True):
    """Where the trace goes: an open file that the caller closes, and its first line.

    What the header says of `content` is what gets recorded.
    """

    out: BinaryIO
    header: Header
    lost: Callable[[OSError], None]  # told once, when the file can no longer be written


class Service:
    def __init__(
        self,
        engine: Engine,
        limits: Limits,
        policy: Policy,
        *,
        recording: Recording | None = None,
        prefixes: Prefixes | None = None,
        seeds: Callable[[], int] = lambda: secrets.randbits(SEED_BITS),
    ) -> None:
        self.limits = limits
        self.clock: Clock = AsyncioClock()
        self._engine = engine
        self._mailbox = Mailbox(self.clock)
        self.gateway = Gateway(limits, self.clock, self._mailbox, seeds, prefixes=prefixes)
        self.watch = Watch(self.gateway)
        self._prefixes = prefixes
        state = initial(limits, policy)
        self._worker = ThreadWorker(engine, self.clock, self._mailbox.post)
        trace = recording and TraceWriter(recording.out, recording.header, state)
        tells = trace is not None and trace.content != "counts"
        self._stepper = Stepper(
            state,
            Performer(self._worker, self.gateway),
            trace,
            recording and recording.lost,
            self._observe,
            Contents(trace, self.gateway, self._worker).tell if trace and tells else None,
        )
        self._running: asyncio.Task[Stop] | None = None
        self._observers: tuple[Observe, ...] = ()

    async def __aenter__(self) -> Self:
        self._running = asyncio.create_task(self._run(), name="phaseloop")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._running is not None
        if not self._running.done():
            self._running.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await self._running

    @property
    def state(self) -> State:
        """The scheduler's state as of the last event."""
        return self._stepper.state

    @property
    def description(self) -> Description:
        return self._engine.describe()

    def held(self, slot: SlotIndex) -> tuple[Sequence[int], Adapters]:
        """The tokens whose state an idle slot was left with for later prompts."""
        if self._prefixes is None:
            return (), ()
        ids, adapters = self._prefixes.held(slot)
        return ids.tolist(), adapters

    @property
    def has_ended(self) -> bool:
        """Whether nothing will be answered any more, for whatever reason."""
        return self._running is not None and self._running.done()

    async def ended(self) -> Stop:
        """Wait until the reducer has said Stop; raises what ended the loop otherwise."""
        assert self._running is not None, "entered"
        return await asyncio.shield(self._running)

    def shut_down(self) -> None:
        """As one SIGTERM: the first ends in order within the grace, the second at once (R16)."""
        self._mailbox.post(ShutdownRequested(at_ns=self.clock.now_ns()))

    def change_policy(self, policy: Policy) -> None:
        """Applied at the next moment without a round in flight (R15)."""
        self._mailbox.post(PolicyChanged(at_ns=self.clock.now_ns(), policy=policy))

    @contextmanager
    def observed(self, observe: Observe) -> Generator[None]:
        """Within, `observe` is shown every step before its effects are performed.

        It runs in the loop: it must be quick, and must not raise.
        """
        self._observers = (*self._observers, observe)
        try:
            yield
        finally:
            self._observers = tuple(other for other in self._observers if other != observe)

    def _observe(self, event: AnyEvent, before: State, after: State, effects: Effects) -> None:
        self.watch.observe(event, before, after, effects)
        if self._prefixes is not None:
            self._prefixes.observe(event, before, after, effects)
        for observe in self._observers:
            observe(event, before, after, effects)

    async def _run(self) -> Stop:
        """However the loop ends, nobody waits for an answer and the trace gets its footer."""
        stop = Stop(EXIT_FAULT, "engine_lost")  # what clients are told if the loop itself fails
        try:
            stop = await run(self._stepper, self._mailbox)
            return stop
        except asyncio.CancelledError:
            stop = Stop(0, "shutdown")
            raise
        finally:
            self.gateway.close(stop.reason)
            self._stepper.close(stop.reason, stop.exit_code)
            with suppress(TimeoutError):
                async with asyncio.timeout(WORKER_CLOSE_S):
                    await self._worker.close()
