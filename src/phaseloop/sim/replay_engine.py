"""The engine of a run that is made again: recorded answers, durations from a cost model.

Where it knows how the recorded run went on, a round that is launched exactly as recorded (same
number, kind and lanes) ends as recorded.  So a run that is made again and not disturbed repeats
itself, and one that is disturbed parts from it only where it must.
"""

from collections.abc import Mapping
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from phaseloop.core.state import State
from phaseloop.core.vocabulary import (
    DeliverTokens,
    Failed,
    FinishRequest,
    Lane,
    LaunchRound,
    Produced,
    ReleaseSlot,
    RequestArrived,
    RequestId,
    RequestSeated,
    Result,
    RoundCompleted,
    RoundFailed,
    RoundKind,
    SeatRequest,
    SlotIndex,
    StopMatched,
)
from phaseloop.engine.sim_cost import Cost, duration_ns

from .replay_prefix import Held, Shelf
from .replay_scenario import Answer, Key, Scenario

RoundEnd: TypeAlias = RoundCompleted | RoundFailed


class RecordedRound(Struct, frozen=True):
    kind: RoundKind
    lanes: tuple[Lane, ...]
    end: RoundEnd
    after_ns: int  # from its launch to the event


class Past(Struct, frozen=True):
    """Where a run is taken up in the middle.  `rounds` is None where there is no such record."""

    rounds: Mapping[int, RecordedRound] | None = None  # how those from here on went
    tokens: Mapping[Key, int] = {}  # delivered before
    draws: Mapping[Key, int] = {}  # decode rounds with drafts before
    held: Mapping[SlotIndex, Held] = {}  # what empty slots hold
    seated: Mapping[SlotIndex, RequestId] = {}
    alive: tuple[RequestId, ...] = ()


NO_PAST = Past()


class RecordedEngine:
    """Says how each round ends.  Counts what was delivered, to know where an answer is."""

    def __init__(self, scenario: Scenario, cost: Cost, past: Past = NO_PAST) -> None:
        self.reused = 0  # rounds that ended as recorded
        self.is_in_step = past.rounds is not None  # nothing has differed from the record so far
        self._cost = cost
        self._step_tokens = scenario.step_tokens
        self._rows = 0  # of the round in flight
        self._rounds = past.rounds or {}
        self._answers: dict[Key, Answer] = {(a.request_id, a.choice): a for a in scenario.answers}
        self._tokens = dict(past.tokens)
        self._draws = dict(past.draws)
        self._shelf = Shelf(scenario.prefixes, past.held, past.seated, past.alive)

    def run(self, launch: LaunchRound, state: State, now_ns: int) -> RoundEnd:
        """The event that ends the round, at its time."""
        self._rows = sum(lane.count for lane in launch.lanes)
        recorded = self._rounds.get(launch.round_id)
        if recorded is not None and (recorded.kind, recorded.lanes) == (launch.kind, launch.lanes):
            self.reused += 1
            for lane in launch.lanes:
                self._draw(lane)
            return replace(recorded.end, at_ns=now_ns + recorded.after_ns)
        self.is_in_step = False

        def has_begun(lane: Lane) -> bool:
            s = state.slots[lane.slot]
            return s is not None and s.produced > 0

        length_ns = duration_ns(self._cost, launch, has_begun)
        return RoundCompleted(
            at_ns=now_ns + length_ns,
            round_id=launch.round_id,
            results=tuple(self._result(launch, lane) for lane in launch.lanes),
            duration_ns=length_ns,
        )

    def step_ns(self, length_ns: int) -> int:
        """Between two looks at whether to abort, in the round in flight if it takes so long."""
        return -(-length_ns // max(1, -(-self._rows // self._step_tokens)))

    def arrive(self, event: RequestArrived, state: State) -> RequestArrived:
        """The call as the gateway would make it now: caches are elsewhere than in the record."""
        if not self.is_in_step:
            requests = tuple(self._shelf.renamed(request, state) for request in event.requests)
            event = replace(event, requests=requests)
        for request in event.requests:
            self._shelf.arrive(request)
        return event

    def seat(self, seat: SeatRequest, now_ns: int) -> RequestSeated:
        """What is found in the cache: as recorded, else as the families of prompts tell."""
        answer = self._answers.get((seat.request_id, seat.choice))
        found = self._shelf.seat(seat.slot, seat.request_id)
        is_stored = seat.source is not None and seat.source.source == "snapshot"
        if seat.reason in ("sibling", "resume"):
            found = 0
        elif self.is_in_step and answer is not None and answer.slot == seat.slot:
            found = answer.cached
        elif seat.source is not None and is_stored:
            found = seat.source.length
        return RequestSeated(
            at_ns=now_ns + (0 if answer is None else answer.seated_after_ns),
            request_id=seat.request_id,
            choice=seat.choice,
            slot=seat.slot,
            cached_length=found,
            restore=is_stored and found > 0,
        )

    def release(self, effect: ReleaseSlot) -> None:
        self._shelf.release(effect.slot, effect.keep)

    def end(self, effect: FinishRequest) -> None:
        self._shelf.end(effect.request_id)

    def delivered(self, effect: DeliverTokens, now_ns: int) -> tuple[StopMatched, ...]:
        """The stop strings that clients will see because of these tokens."""
        stops: list[StopMatched] = []
        for delivery in effect.deliveries:
            key = (delivery.request_id, delivery.choice)
            before = self._tokens.get(key, 0)
            self._tokens[key] = tokens = before + delivery.tokens
            answer = self._answers.get(key)
            if answer is None or answer.tokens is None or answer.stop_after_ns is None:
                continue
            if before < answer.tokens <= tokens:
                at_ns = now_ns + answer.stop_after_ns
                stops.append(StopMatched(at_ns=at_ns, request_id=key[0], choice=key[1]))
        return tuple(stops)

    def _result(self, launch: LaunchRound, lane: Lane) -> Result:
        answer = self._answers.get((lane.request_id, lane.choice))
        if answer is None:
            return Produced(1 if lane.outputs else 0)
        fails_at = answer.fails_at
        if fails_at is not None and lane.start + lane.count >= fails_at and launch.kind != "save":
            return Failed("as recorded")
        if not lane.outputs:
            return Produced(0)
        tokens = self._accepted(answer, self._draw(lane), lane)
        if answer.tokens is None or answer.stop_after_ns is not None:
            return Produced(tokens)
        left = answer.tokens - self._tokens.get((lane.request_id, lane.choice), 0)
        if left <= 0 or (tokens >= left and not answer.is_late):
            return Produced(max(0, left), finish=True)
        return Produced(min(tokens, left))

    def _draw(self, lane: Lane) -> int | None:
        """How many rounds with drafts this sequence had; None if this is none."""
        if lane.outputs < 2:
            return None
        key = (lane.request_id, lane.choice)
        draw = self._draws.get(key, 0)
        self._draws[key] = draw + 1
        return draw

    def _accepted(self, answer: Answer, draw: int | None, lane: Lane) -> int:
        """Tokens of a round: as many drafts hold as held in the recorded one, in turn."""
        if draw is None or not answer.accepted:
            return 1
        return min(answer.accepted[draw % len(answer.accepted)], lane.outputs)
