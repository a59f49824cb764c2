"""An engine whose every answer is known beforehand, and worlds to run it in."""

import asyncio
import itertools
import random
import selectors
from collections.abc import Callable, Coroutine
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from msgspec.structs import replace

from phaseloop.core.policy import PRESETS
from phaseloop.core.reduce import reduce
from phaseloop.core.state import State, initial
from phaseloop.core.vocabulary import (
    AbortRound,
    AnyEffect,
    AnyEvent,
    DropSaved,
    FinishRequest,
    Lane,
    LaunchRound,
    Policy,
    Produced,
    ReleaseSlot,
    Request,
    RequestArrived,
    RequestCancelled,
    Result,
    SeatRequest,
    ShutdownRequested,
)
from phaseloop.engine.protocol import Content, Description, Outcome, Seated, limits_of
from phaseloop.runtime.clock import AsyncioClock, Callback, VirtualClock
from phaseloop.runtime.digest import Fingerprint
from phaseloop.runtime.gateway import Call, Gateway, Submission
from phaseloop.runtime.loop import Stepper, run, run_virtual
from phaseloop.runtime.mailbox import Mailbox
from phaseloop.runtime.perform import Performer
from phaseloop.runtime.trace import Checkpoint, Header, Recorded, TraceWriter, open_trace
from phaseloop.runtime.virtual_worker import VirtualWorker
from phaseloop.runtime.watch import Watch

MS = 1_000_000
DESCRIPTION = Description(
    name="scripted", slot_count=2, batch_tokens=64, context_length=4096, page_count=64
)


class ScriptedEngine:
    """Every choice's text ends after `length` tokens; token n of request r is 1000 r + n.

    `on_run`, `on_seat` and `on_release` are called first, and may raise.
    """

    def __init__(self, length: int = 3, *, duration_ns: int = MS, step_ns: int | None = None):
        self.length = length
        self.duration_ns = duration_ns
        self.step_ns = step_ns
        self.launches: list[LaunchRound] = []
        self.seats: list[tuple[SeatRequest, Content]] = []
        self.releases: list[tuple[int, int, int]] = []
        self.drops: list[tuple[int, int]] = []
        self.aborts: list[int] = []
        self.on_run: Callable[[LaunchRound], None] = lambda launch: None
        self.on_seat: Callable[[SeatRequest], None] = lambda seat: None
        self.on_release: Callable[[int], None] = lambda slot: None
        self.on_abort: Callable[[int], None] = lambda round_id: None
        self._produced: dict[tuple[int, int], int] = {}

    def describe(self) -> Description:
        return DESCRIPTION

    def seat(self, seat: SeatRequest, content: Content) -> Seated:
        self.seats.append((seat, content))
        self.on_seat(seat)
        return Seated()

    def run(self, launch: LaunchRound) -> Outcome:
        self.launches.append(launch)
        self.on_run(launch)
        results, tokens = zip(*(self._lane(lane) for lane in launch.lanes), strict=True)
        return Outcome(results, tokens, duration_ns=self.duration_ns, step_ns=self.step_ns)

    def abort(self, round_id: int) -> None:
        self.aborts.append(round_id)
        self.on_abort(round_id)

    def release(self, slot: int, keep: int, version: int) -> None:
        self.releases.append((slot, keep, version))
        self.on_release(slot)

    def drop(self, request_id: int, choice: int) -> None:
        self.drops.append((request_id, choice))

    def _lane(self, lane: Lane) -> tuple[Result, tuple[int, ...]]:
        if not lane.outputs:
            return Produced(), ()
        key = (lane.request_id, lane.choice)
        position = self._produced.get(key, 0)
        self._produced[key] = position + 1
        if position == self.length:
            return Produced(0, finish=True), ()
        return Produced(1), (1000 * lane.request_id + position,)


class BareWorld:
    """A stepper in virtual time without clients: effects on them are only kept."""

    def __init__(
        self,
        engine: ScriptedEngine,
        policy: Policy = PRESETS["barrier-fair"],
        out: BinaryIO | None = None,
    ):
        self.clock = VirtualClock()
        self.worker = VirtualWorker(engine, self.clock)
        self.effects: list[AnyEffect] = []
        state = initial(limits_of(engine.describe()), policy)
        trace = None if out is None else TraceWriter(out, header_for(state), state)
        self.stepper = Stepper(state, self.perform, trace)

    def perform(self, effect: AnyEffect) -> None:
        self.effects.append(effect)
        match effect:
            case LaunchRound():
                self.worker.launch(effect)
            case SeatRequest():
                self.worker.seat(effect, Content())
            case ReleaseSlot():
                self.worker.release(effect)
            case AbortRound():
                self.worker.abort(effect)
            case DropSaved():
                self.worker.drop(effect)
            case _:
                pass


def header_for(state: State) -> Header:
    return Header(
        version="0", core="0" * 16, policy=state.policy, limits=state.limits, engine="scripted"
    )


def arrival(at_ns: int, request_id: int, prompt_length: int = 8, **fields: Any) -> RequestArrived:
    return RequestArrived(at_ns=at_ns, requests=(Request(request_id, prompt_length, **fields),))


def random_events(seed: int, requests: int) -> list[AnyEvent]:
    """Arrivals, some of them together, some cancelled, some hurried; then a shutdown."""
    draw = random.Random(seed)
    events: list[AnyEvent] = []
    at_ns = 0
    for request_id in range(requests):
        at_ns += draw.choice((0, 1, 3 * MS, 10 * MS))
        hurried = draw.random() < 0.2
        events.append(
            arrival(
                at_ns,
                request_id,
                draw.randint(1, 200),
                output_limit=draw.choice((0, 1, 2, None)),
                priority=draw.choice((0, 0, 1)),
                queue_wait_ns_max=5 * MS if hurried else None,
            )
        )
        if draw.random() < 0.2:
            at = at_ns + draw.choice((0, MS, 20 * MS))
            events.append(RequestCancelled(at_ns=at, request_id=request_id))
    events.append(ShutdownRequested(at_ns=at_ns + 50 * MS))
    return events


def record(seed: int = 0, requests: int = 40, out: BinaryIO | None = None) -> bytes:
    """The trace of a whole run in virtual time."""
    out = BytesIO() if out is None else out
    world = BareWorld(ScriptedEngine(), out=out)
    for event in random_events(seed, requests):
        world.clock.post(event)
    stop = run_virtual(world.stepper, world.clock)
    assert stop is not None
    world.stepper.close(stop.reason, stop.exit_code)
    assert isinstance(out, BytesIO)
    return out.getvalue()


def verify(path: Path) -> bool:
    """Whether a trace is whole and every digest in it is what its events lead to."""
    with open_trace(path) as reader:
        state = initial(reader.header.limits, reader.header.policy)
        fingerprint = Fingerprint(reader.header_line, state)
        for _, record in reader:
            if isinstance(record, Recorded):
                after, effects = reduce(state, record.event)
                event, before, state = record.event, state, after
                chain = fingerprint.step(record.event_json, event, before, after, effects)
                if chain != record.chain:
                    return False
            elif isinstance(record, Checkpoint) and record.subtrees != fingerprint.subtrees(state):
                return False
        return reader.footer is not None and reader.torn_line is None


class JumpingSelector(selectors.DefaultSelector):
    """Instead of waiting, lets the loop's time jump to its next timer."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "nothing will ever happen: the test waits for nobody"
            self.now_s += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop without waiting: for tests that use timers and no threads."""

    def __init__(self) -> None:
        self._jumping = JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s

    def time_ns(self) -> int:
        return round(self._jumping.now_s * 1e9)


class LoopSchedule:
    """Stands in for VirtualClock where asyncio drives: what is due is posted to a mailbox."""

    def __init__(self) -> None:
        running = asyncio.get_running_loop()
        assert isinstance(running, VirtualLoop)
        self.loop = running
        self._clock = AsyncioClock(running.time_ns)
        self.mailbox = Mailbox(self._clock)

    def now_ns(self) -> int:
        return self._clock.now_ns()

    def post(self, event: AnyEvent) -> None:
        self.mailbox.post(event)

    def call_at(self, at_ns: int, callback: Callback) -> asyncio.TimerHandle:
        def call() -> None:
            event = callback()
            if event is not None:
                self.post(event)

        return self.loop.call_at(at_ns / 1e9, call)

    def cancel(self, ticket: asyncio.TimerHandle) -> None:
        ticket.cancel()

    async def until(self, at_ns: int) -> None:
        passed = self.loop.create_future()
        self.loop.call_at(at_ns / 1e9, passed.set_result, None)
        await passed


class Shell:
    """Everything that a server has between its HTTP side and its engine."""

    def __init__(
        self,
        engine: ScriptedEngine | None = None,
        *,
        outbox_mark: int = 1024,
        watched: bool = False,
        **limits: int,
    ) -> None:
        self.engine = engine or ScriptedEngine()
        self.schedule = LoopSchedule()
        self.limits = replace(limits_of(self.engine.describe()), **limits)
        seeds = itertools.count(700)
        self.gateway = Gateway(
            self.limits,
            self.schedule,
            self.schedule.mailbox,
            lambda: next(seeds),
            outbox_mark=outbox_mark,
        )
        worker = VirtualWorker(self.engine, self.schedule)
        performer = Performer(worker, self.gateway)
        self.finished: list[FinishRequest] = []
        self.events: list[AnyEvent] = []

        def perform(effect) -> None:
            if isinstance(effect, FinishRequest):
                self.finished.append(effect)
            performer(effect)

        self.watch = Watch(self.gateway)
        observe = self.watch.observe if watched else None
        state = initial(self.limits, PRESETS["barrier-fair"])
        self.stepper = Stepper(state, perform, observe=observe)
        step = self.stepper.step

        def noted(event: AnyEvent) -> None:
            self.events.append(event)
            step(event)

        self.stepper.step = noted
        self.running = asyncio.create_task(run(self.stepper, self.schedule.mailbox))

    def submit(self, *requests: Request) -> Call:
        return self.gateway.submit([Submission(request) for request in requests])

    async def shut_down(self) -> None:
        self.schedule.post(ShutdownRequested(at_ns=self.schedule.now_ns()))
        self.schedule.post(ShutdownRequested(at_ns=self.schedule.now_ns()))
        await self.running
        assert self.gateway._streams == {}, "every stream that was opened has ended"
        ids = [finish.request_id for finish in self.finished]
        assert sorted(ids) == sorted(set(ids)), "nobody ends twice"

    def count(self, kind: type[AnyEvent]) -> int:
        return sum(isinstance(event, kind) for event in self.events)


T = TypeVar("T")


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
