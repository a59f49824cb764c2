"""Faults laid over a trace: up to the first one as recorded, from there on made again."""

import re

from msgspec import Struct
from msgspec.structs import replace

from phaseloop.core.state import State
from phaseloop.core.vocabulary import (
    AnyEvent,
    LaunchRound,
    RequestSeated,
    RoundCompleted,
    RoundFailed,
    SeatRequest,
    StopMatched,
)
from phaseloop.engine.sim_cost import PPM, Cost

from .replay import Step
from .replay_engine import Past, RecordedEngine, RecordedRound
from .replay_rerun import Fault, Rerun, Watcher
from .replay_scenario import Key, Scenario, Scribe

FAULT = re.compile(
    r"(?:(cancel)@(\d{1,18}):req:(\d{1,18})|(fail|lost)@(\d{1,18})"
    r"|slow=(\d{1,4}(?:\.\d{1,3})?)x@(\d{1,18}))"
)
SHAPES = "cancel@SEQ:req:ID, fail@SEQ, slow=3x@SEQ or lost@SEQ"


class FaultError(ValueError):
    """The text is no fault, or the trace has no such place."""


def parse_faults(text: str) -> tuple[Fault, ...]:
    """One or more, with commas.  Raises FaultError."""
    return tuple(parse_fault(part.strip()) for part in text.split(","))


def parse_fault(text: str) -> Fault:
    match = FAULT.fullmatch(text)
    if match is None:
        raise FaultError(f"--inject: {text!r} is not {SHAPES}")
    cancel, cancel_seq, request_id, other, other_seq, factor, slow_seq = match.groups()
    if cancel is not None:
        return Fault("cancel", int(cancel_seq), request_id=int(request_id))
    if other is not None:
        return Fault("fail" if other == "fail" else "lost", int(other_seq))
    whole, _, fraction = factor.partition(".")
    factor_ppm = int(whole) * PPM + int(fraction.ljust(6, "0") or "0")
    if factor_ppm == 0:
        raise FaultError(f"--inject: {text!r}: a round takes some time; 0.001x is the least")
    return Fault("slow", int(slow_seq), factor_ppm=factor_ppm)


class Beginning(Struct):
    """All there is to know about the moment after the event at which the first fault strikes."""

    state: State
    seq: int
    now_ns: int
    inputs: int  # how many came before
    made: int  # other events of the same time
    launch: LaunchRound | None
    launched_ns: int
    seats: tuple[Key, ...]  # asked for, not answered
    past: Past  # all but the rounds


class Injection:
    """Watches a whole fold; then `rerun` makes the disturbed run.

    Keeps what happened after the first fault, which is as much as the trace holds from there on.
    """

    def __init__(self, scribe: Scribe, seq: int) -> None:
        """`scribe` must have seen a step before this does; `seq` is that of the first fault."""
        self._scribe = scribe
        self._seq = seq
        self.beginning: Beginning | None = None
        self._rounds: dict[int, RecordedRound] = {}
        self._later: list[
            RequestSeated | StopMatched
        ] = []  # seats and stop strings after the first fault
        self._launch: LaunchRound | None = None
        self._launched_ns = 0
        self._seats: dict[Key, None] = {}

    def see(self, step: Step) -> None:
        event = step.event
        if isinstance(event, RoundCompleted | RoundFailed):
            self._see_end(event)
        elif isinstance(event, RequestSeated):
            self._seats.pop((event.request_id, event.choice), None)
        if step.seq > self._seq and isinstance(event, RequestSeated | StopMatched):
            self._later.append(event)
        for effect in step.effects:
            if isinstance(effect, LaunchRound):
                self._launch, self._launched_ns = effect, event.at_ns
            elif isinstance(effect, SeatRequest):
                self._seats[(effect.request_id, effect.choice)] = None
        if step.seq == self._seq:
            self.beginning = Beginning(
                step.after,
                step.seq,
                event.at_ns,
                len(self._scribe.inputs),
                self._scribe.made,
                self._launch,
                self._launched_ns,
                tuple(self._seats),
                self._past(step.after),
            )

    def rerun(
        self,
        scenario: Scenario,
        cost: Cost,
        faults: tuple[Fault, ...],
        watchers: tuple[Watcher, ...],
    ) -> Rerun:
        """Ready to run.  `scenario` is the scribe's, once it has seen the whole trace.

        Raises FaultError where the trace does not get to the first fault.
        """
        begin = self.beginning
        if begin is None:
            raise FaultError(f"--inject: there is no event {self._seq} in the trace")
        inputs, after = scenario.inputs[begin.inputs :], scenario.after[begin.inputs :]
        engine = RecordedEngine(scenario, cost, replace(begin.past, rounds=self._rounds))
        rerun = Rerun(
            engine,
            begin.state,
            watchers,
            seq=begin.seq + 1,
            now_ns=begin.now_ns,
            made=begin.made,
            until_ns=scenario.until_ns,
            faults=faults,
        )
        rerun.enter(inputs, after)
        rerun.post(self._promised(begin, scenario))
        if begin.launch is not None and begin.state.flight is not None:
            rerun.launch(begin.launch, begin.launched_ns)
        return rerun

    def _past(self, state: State) -> Past:
        seated = {i: s.request.request_id for i, s in enumerate(state.slots) if s is not None}
        saved = (one.sequence.request.request_id for one in state.saved)
        return Past(
            tokens=dict(self._scribe.tokens),
            draws={key: len(tokens) for key, tokens in self._scribe.accepted.items()},
            held=dict(self._scribe.held),
            seated=seated,
            alive=tuple(sorted({*seated.values(), *saved, *state.queue})),
        )

    def _see_end(self, event: RoundCompleted | RoundFailed) -> None:
        launch = self._launch
        if launch is None or launch.round_id != event.round_id:
            return
        if self.beginning is not None:
            after_ns = event.at_ns - self._launched_ns
            recorded = RecordedRound(launch.kind, launch.lanes, event, after_ns)
            self._rounds[launch.round_id] = recorded

    def _promised(self, begin: Beginning, scenario: Scenario) -> list[AnyEvent]:
        """What was under way when the first fault struck, and came as recorded."""
        seats = dict.fromkeys(begin.seats)
        stops = {
            (answer.request_id, answer.choice)
            for answer in scenario.answers
            if answer.stop_after_ns is not None
            and answer.tokens is not None
            and begin.past.tokens.get((answer.request_id, answer.choice), 0) >= answer.tokens
        }
        promised: list[AnyEvent] = []
        for event in self._later:
            key = (event.request_id, event.choice)
            if isinstance(event, StopMatched):
                if key in stops:
                    promised.append(event)
            elif key in seats:
                del seats[key]
                promised.append(event)
        return promised
