"""A run in virtual time: the server's own loop, an engine that pretends, and a clock that jumps.

Two runs with the same arguments go through the same events at the same times, byte for byte.
"""

from collections.abc import Callable, Iterator
from typing import BinaryIO, TypeAlias, assert_never

from msgspec import Struct

from phaseloop import __version__
from phaseloop.core.state import Limits, State, initial
from phaseloop.core.vocabulary import (
    AbortRound,
    AnyEffect,
    AnyEvent,
    DeliverTokens,
    DropSaved,
    Effects,
    FinishChoice,
    FinishRequest,
    LaunchRound,
    Policy,
    ReleaseSlot,
    SeatRequest,
    Stop,
)
from phaseloop.engine.protocol import Content
from phaseloop.engine.sim import SimEngine, SimModel
from phaseloop.engine.sim_faults import Faults
from phaseloop.runtime.clock import VirtualClock
from phaseloop.runtime.digest import core_digest
from phaseloop.runtime.loop import Perform, Stepper, run_virtual
from phaseloop.runtime.trace import Header, TraceWriter
from phaseloop.runtime.virtual_worker import VirtualWorker

from .arrivals import Arrival
from .crowd import Crowd, Roll
from .metrics import Collector, Summary

PROGRESS_EVENTS = 4096

Watch: TypeAlias = Callable[[AnyEvent, State, State, Effects], None]
Progress: TypeAlias = Callable[[int, int], None]  # events so far, the time in nanoseconds


class Scene(Struct, frozen=True, kw_only=True):
    """All that decides a run, but for the arrivals."""

    limits: Limits
    policy: Policy
    model: SimModel
    seed: int = 0
    cut_ns: int | None = None  # the run ends here, whatever is unfinished


def simulate(
    scene: Scene,
    arrivals: Iterator[Arrival],
    *,
    faults: Faults | None = None,
    trace: BinaryIO | None = None,
    watch: Watch | None = None,
    progress: Progress | None = None,
) -> Summary:
    """Run until nothing will ever happen again, or the cut.

    `arrivals` come in the order of their times and ids.  `trace` gets the run as a trace; `watch`
    is called after every step.  Raises OSError if the trace cannot be written, and Violation if the
    reducer breaks a promise.
    """
    state = initial(scene.limits, scene.policy)
    writer = None if trace is None else TraceWriter(trace, header_of(scene), state)
    collector = Collector(scene.limits, scene.policy)
    watches = [collector.observe] if watch is None else [collector.observe, watch]
    clock, roll = VirtualClock(), Roll()
    engine = SimEngine(scene.model, roll, scene.seed, faults, clock.now_ns)
    crowd = Crowd(clock, arrivals, roll, engine, scene.limits)
    perform = Performer(VirtualWorker(engine, clock), crowd)
    stepper = WatchedStepper(state, perform, writer, watches, progress)
    reason, exit_code = "done", 0
    if scene.cut_ns is not None:
        clock.call_at(scene.cut_ns, cut)
    try:
        stop = run_virtual(stepper, clock)
        if stop is not None:
            reason, exit_code = stop.reason, stop.exit_code
    except CutError:
        reason = "cut"
    stepper.close(reason, exit_code)
    return collector.summary()


def header_of(scene: Scene) -> Header:
    return Header(
        version=__version__,
        core=core_digest(),
        policy=scene.policy,
        limits=scene.limits,
        engine=scene.model.name,
        seed=scene.seed,
    )


class CutError(Exception):
    """The time of the cut has come."""


def cut() -> AnyEvent | None:
    raise CutError


class WatchedStepper(Stepper):
    """A step of the server's loop, shown to those who watch."""

    def __init__(
        self,
        state: State,
        perform: Perform,
        trace: TraceWriter | None,
        watches: list[Watch],
        progress: Progress | None,
    ) -> None:
        super().__init__(state, self._perform_watched, trace)
        self._perform_now = perform
        self._watches = watches
        self._progress = progress
        self._effects: list[AnyEffect] = []
        self._count = 0

    def step(self, event: AnyEvent) -> None:
        before = self.state
        self._effects = []
        super().step(event)
        effects = tuple(self._effects)
        for watch in self._watches:
            watch(event, before, self.state, effects)
        self._count += 1
        if self._progress is not None and self._count % PROGRESS_EVENTS == 0:
            self._progress(self._count, event.at_ns)

    def _perform_watched(self, effect: AnyEffect) -> None:
        self._effects.append(effect)
        self._perform_now(effect)


class Performer:
    """Effects to deeds, as runtime/perform.py does for real clients."""

    def __init__(self, worker: VirtualWorker, crowd: Crowd) -> None:
        self._worker = worker
        self._crowd = crowd

    def __call__(self, effect: AnyEffect) -> None:
        match effect:
            case LaunchRound():
                self._worker.launch(effect)
            case DeliverTokens():
                self._crowd.deliver(effect)
            case SeatRequest():
                self._crowd.taken(effect)
                self._worker.seat(effect, NOTHING)
            case ReleaseSlot():
                self._crowd.released(effect)
                self._worker.release(effect)
            case FinishRequest():
                self._crowd.finish(effect.request_id)
            case AbortRound():
                self._worker.abort(effect)
            case DropSaved():
                self._worker.drop(effect)
            case FinishChoice() | Stop():
                pass
            case _:
                assert_never(effect)


NOTHING = Content()
