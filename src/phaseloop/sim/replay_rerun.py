"""Make a run again from its scenario: the same calls, other decisions, durations or faults.

A discrete-event loop in virtual time.  Unlike the simulator's it can begin in the middle of a run.
What is due at the same time comes in the order in which it was posted, inputs before what is made
in answer unless the scenario knows better; a deadline comes after whatever else is due then.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, repeat
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from phaseloop.core.reduce import deadline_next, reduce
from phaseloop.core.state import State
from phaseloop.core.transitions import live
from phaseloop.core.vocabulary import (
    AbortRound,
    AnyEvent,
    DeadlineReached,
    DeliverTokens,
    Effects,
    EngineLost,
    FinishRequest,
    LaunchRound,
    ReleaseSlot,
    RequestArrived,
    RequestCancelled,
    RequestId,
    RoundCompleted,
    RoundFailed,
    SeatRequest,
    Stop,
)
from phaseloop.engine.sim_cost import PPM

from .replay_engine import RecordedEngine, RoundEnd

EVENTS_MAX = 20_000_000  # a run that is longer than this never ends

INJECTED = "injected"

Watcher = Callable[[AnyEvent, State, State, Effects], None]


class RerunError(RuntimeError):
    """The run does not come to an end."""


class Fault(Struct, frozen=True):
    """Strikes right after event `seq`.

    cancel     the client of `request_id` goes away
    lost       the engine is lost
    fail, slow the round in flight, or the next one launched, fails, or takes `factor_ppm` as long
    """

    kind: Literal["cancel", "lost", "fail", "slow"]
    seq: int
    request_id: RequestId = 0
    factor_ppm: int = PPM


class Rerun:
    """One run.  Enter its inputs, then `run`; afterwards `state`, `seq`, `now_ns` are the last."""

    def __init__(
        self,
        engine: RecordedEngine,
        state: State,
        watchers: tuple[Watcher, ...],
        *,
        seq: int = 0,
        now_ns: int = 0,
        made: int = 0,
        until_ns: int | None = None,
        events_max: int = EVENTS_MAX,
        faults: Iterable[Fault] = (),
    ) -> None:
        """`seq` is the number of the next event, `now_ns` the time of the last one.

        `made` is how many events of that time have been that were no inputs.  Nothing happens
        after `until_ns`.
        """
        self.state, self.seq, self.now_ns = state, seq, now_ns
        self.engine = engine
        self._watchers = watchers
        self.faults = sorted(faults, key=lambda fault: fault.seq)  # that have not struck yet
        self.missed: list[Fault] = []  # cancels of who was not there
        self._urgent: list[AnyEvent] = []  # what faults bring about, before anything else
        self._inputs: deque[tuple[AnyEvent, int]] = deque()
        self._made = made  # events of the present time that are no inputs
        self._heap: list[tuple[int, int, AnyEvent]] = []
        self._order = 0
        self._round_order = 0
        self._round_end: RoundEnd | None = None  # of the round in flight
        self._launched_ns = now_ns
        self._until_ns, self._events_max = until_ns, events_max
        self._stopped = state.stopped
        self._deadline_told = False

    def enter(self, inputs: Iterable[AnyEvent], after: Iterable[int]) -> None:
        """What comes from outside, by time; `after` as in Scenario, and may be shorter."""
        self._inputs.extend(zip(inputs, chain(after, repeat(0)), strict=False))

    def post(self, events: Iterable[AnyEvent]) -> None:
        for event in events:
            heapq.heappush(self._heap, (event.at_ns, self._order, event))
            self._order += 1

    def launch(self, launch: LaunchRound, now_ns: int) -> None:
        """Put a round on the engine; also the one that is in flight in a state begun in."""
        end = self.engine.run(launch, self.state, now_ns)
        self._round_end = replace(end, at_ns=max(end.at_ns, self.now_ns))
        self._round_order, self._order = self._order, self._order + 1
        self._launched_ns = now_ns

    def run(self) -> None:
        """To the end.  Raises RerunError where there is none."""
        self._strike()
        for event in self._events():
            before = self.state
            after, effects = reduce(before, event)
            self.state, self.now_ns = after, event.at_ns
            self._deadline_told = isinstance(event, DeadlineReached)
            for watch in self._watchers:
                watch(event, before, after, effects)
            self.seq += 1
            self._perform(effects, event.at_ns)
            self._strike()

    def _events(self) -> Iterator[AnyEvent]:
        for _ in range(self._events_max):
            if self._stopped:
                return
            event = self._next()
            if event is None or (self._until_ns is not None and event.at_ns > self._until_ns):
                return
            if isinstance(event, RequestArrived):
                event = self.engine.arrive(event, self.state)
            yield event
        raise RerunError(f"the run has no end: {self._events_max:,} events were made")

    def _next(self) -> AnyEvent | None:
        """The earliest of what faults bring about, inputs, what was made, and deadlines."""
        if self._urgent:
            return self._urgent.pop(0)
        made_ns, due_ns = self._made_ns(), self._deadline_ns()
        input_ns = self._inputs[0][0].at_ns if self._inputs else None
        next_ns = min((ns for ns in (made_ns, input_ns) if ns is not None), default=None)
        if next_ns is None or (due_ns is not None and due_ns < next_ns):
            return None if due_ns is None else DeadlineReached(at_ns=due_ns)
        if next_ns != self.now_ns:
            self._made = 0
        if input_ns == next_ns and (made_ns != input_ns or self._made >= self._inputs[0][1]):
            return self._inputs.popleft()[0]
        self._made += 1
        return self._take_made()

    def _made_ns(self) -> int | None:
        """When the next event is due that is no input."""
        posted_ns = self._heap[0][0] if self._heap else None
        end = self._round_end
        if end is None:
            return posted_ns
        return end.at_ns if posted_ns is None else min(posted_ns, end.at_ns)

    def _take_made(self) -> AnyEvent:
        end = self._round_end
        if end is not None:
            key = (end.at_ns, self._round_order)
            if not self._heap or key < self._heap[0][:2]:
                self._round_end = None
                return end
        return heapq.heappop(self._heap)[2]

    def _deadline_ns(self) -> int | None:
        """As runtime/loop.py has it: one that its own event did not clear waits for another."""
        due_ns = deadline_next(self.state)
        if due_ns is None or due_ns > self.now_ns:
            return due_ns
        return None if self._deadline_told else self.now_ns

    def _perform(self, effects: Effects, now_ns: int) -> None:
        for effect in effects:  # first: the engine has made these tokens before it launches again
            if isinstance(effect, DeliverTokens):
                self.post(self.engine.delivered(effect, now_ns))
        for effect in effects:
            match effect:
                case LaunchRound():
                    self.launch(effect, now_ns)
                case SeatRequest():
                    self.post((self.engine.seat(effect, now_ns),))
                case ReleaseSlot():
                    self.engine.release(effect)
                case FinishRequest():
                    self.engine.end(effect)
                case AbortRound():
                    self._abort(effect.round_id, now_ns)
                case Stop():
                    self._stopped = True
                case _:
                    pass

    def _abort(self, round_id: int, now_ns: int) -> None:
        """The round ends where the engine next looks, unless it would be over by then."""
        end = self._round_end
        if end is None or end.round_id != round_id:
            return
        step_ns = self.engine.step_ns(end.at_ns - self._launched_ns)
        if step_ns > 0:
            steps = -(-(now_ns - self._launched_ns) // step_ns)
            at_ns = self._launched_ns + steps * step_ns
            if at_ns < end.at_ns:
                self._round_end = RoundFailed(at_ns=at_ns, round_id=round_id, reason="aborted")

    def _strike(self) -> None:
        """Apply the faults whose time has come; some wait for a round."""
        if not self.faults or self.faults[0].seq >= self.seq:
            return
        self.faults = [f for f in self.faults if f.seq >= self.seq or not self._struck(f)]

    def _struck(self, fault: Fault) -> bool:
        if fault.kind == "cancel":
            cancelled = RequestCancelled(at_ns=self.now_ns, request_id=fault.request_id)
            self._urgent.append(cancelled)
            if fault.request_id not in live(self.state):
                self.missed.append(fault)
        elif fault.kind == "lost":
            self._urgent.append(EngineLost(at_ns=self.now_ns, reason=INJECTED))
        elif self._round_end is None:
            return False
        elif fault.kind == "fail":
            end = self._round_end
            self._round_end = RoundFailed(at_ns=end.at_ns, round_id=end.round_id, reason=INJECTED)
        else:
            end = self._round_end
            length_ns = (end.at_ns - self._launched_ns) * fault.factor_ppm // PPM
            at_ns = max(self.now_ns, self._launched_ns + length_ns)
            self._round_end = self._ending_at(end, at_ns)
        return True

    def _ending_at(self, end: RoundEnd, at_ns: int) -> RoundEnd:
        if isinstance(end, RoundCompleted):
            return replace(end, at_ns=at_ns, duration_ns=at_ns - self._launched_ns)
        return replace(end, at_ns=at_ns)
