"""What came from outside during a run: calls, cancels, and how long each answer would be.

A scenario is what remains of a trace when everything that phaseloop itself decided is taken away.
Given a policy and a cost model, sim/replay_rerun.py makes a run of it again.

How long an answer is follows from the trace where it ended by itself: there it stays the same under
any policy.  An answer that was cut (by its limit, a cancel, a deadline, the end of the trace) says
nothing about how it would have gone on: it is taken to go on until something cuts it again.  Where
a trace ends with requests under way, a run that is made of it ends at that time, too.
"""

from msgspec import Struct
from msgspec.structs import replace

from phaseloop.core.state import LIVE, Limits
from phaseloop.core.vocabulary import (
    AnyEvent,
    ClientResumed,
    ClientStalled,
    DeliverTokens,
    EngineLost,
    Failed,
    FinishChoice,
    FinishReason,
    Lane,
    Policy,
    PolicyChanged,
    ReleaseSlot,
    RequestArrived,
    RequestCancelled,
    RequestId,
    RequestSeated,
    RoundCompleted,
    RoundFailed,
    SeatRequest,
    ShutdownRequested,
    SlotIndex,
    StopMatched,
)

from .replay import Step
from .replay_prefix import Held, Kin, Prefix

Key = tuple[RequestId, int]

INPUTS = (
    RequestArrived,
    RequestCancelled,
    ClientStalled,
    ClientResumed,
    EngineLost,
    PolicyChanged,
    ShutdownRequested,
)
CUT: tuple[FinishReason, ...] = ("cancelled", "stalled", "deadline", "shutdown", "engine_lost")


class Answer(Struct, frozen=True, omit_defaults=True):
    """What one choice would say, and what the engine does with it."""

    request_id: RequestId
    choice: int = 0
    tokens: int | None = None  # after so many it ends by itself; None: it never does
    stop_after_ns: int | None = None  # the client's stop string is seen so long after the last one
    is_late: bool = False  # the end comes in a round of its own, without a token
    accepted: tuple[int, ...] = ()  # tokens per decode round with drafts, in order and again
    seated_after_ns: int = 0  # how long the look at the cache took
    slot: SlotIndex | None = None  # where the cache was looked at first
    cached: int = 0  # prompt tokens found there
    fails_at: int | None = None  # the engine fails the lane that reaches so many tokens


class Scenario(Struct, frozen=True):
    limits: Limits
    policy: Policy
    inputs: tuple[AnyEvent, ...]  # by time; all other events are made by the shell in answer
    answers: tuple[Answer, ...]  # one per choice that was seated
    prefixes: tuple[Prefix, ...] = ()  # of prompts that begin like another
    step_tokens: int = 1024  # rows between two looks of the engine at whether to abort
    after: tuple[int, ...] = ()  # per input: how many made events of its time come before it
    until_ns: int | None = None  # the run is cut here, whatever is unfinished
    cut: int = 0  # answers that did not end by themselves or by their limit


class Scribe:
    """Watches a fold and takes down its scenario."""

    def __init__(self, limits: Limits, policy: Policy) -> None:
        self._limits, self._policy = limits, policy
        self.inputs: list[AnyEvent] = []
        self.made = 0  # events at the time of the last one that are no inputs
        self._made_ns = 0
        self._after: list[int] = []
        self._answers: dict[Key, Answer] = {}
        self.tokens: dict[Key, int] = {}  # delivered so far
        self._asked_ns: dict[Key, int] = {}  # for a seat, not answered yet
        self._sent_ns: dict[Key, int] = {}
        self.accepted: dict[Key, list[int]] = {}  # per decode round with drafts so far
        self._open: set[Key] = set()  # seated, not ended
        self.held: dict[SlotIndex, Held] = {}
        self._kin = Kin()
        self._cut = 0
        self._last: Step | None = None

    def see(self, step: Step) -> None:
        event = step.event
        self._last = step
        if event.at_ns != self._made_ns:
            self._made_ns = event.at_ns
            self.made = 0
        if isinstance(event, INPUTS):
            self._see_input(event)
        else:
            self.made += 1
            self._see_made(step, event)
        for effect in step.effects:
            if isinstance(effect, DeliverTokens):
                for delivery in effect.deliveries:
                    key = (delivery.request_id, delivery.choice)
                    self.tokens[key] = self.tokens.get(key, 0) + delivery.tokens
                    self._sent_ns[key] = event.at_ns
            elif isinstance(effect, ReleaseSlot):
                self._see_release(step, effect)
            elif isinstance(effect, SeatRequest):
                self._asked_ns[(effect.request_id, effect.choice)] = event.at_ns
            elif isinstance(effect, FinishChoice):
                self._see_end(step, effect)

    def scenario(self) -> Scenario:
        answers = tuple(self._finished(key) for key in self._answers)
        cut = self._cut + len(self._open)
        return Scenario(
            self._limits,
            self._policy,
            tuple(self.inputs),
            answers,
            self._kin.prefixes(),
            after=tuple(self._after),
            until_ns=self._until_ns(),
            cut=cut,
        )

    def _until_ns(self) -> int | None:
        if self._last is None:
            return None
        state = self._last.after
        seated = any(s is not None and s.role in LIVE for s in state.slots)
        return self._last.event.at_ns if seated or state.queue or state.saved else None

    def _see_input(self, event: AnyEvent) -> None:
        self.inputs.append(event)
        self._after.append(self.made)
        if isinstance(event, RequestArrived):
            self._see_kin(event)

    def _see_made(self, step: Step, event: AnyEvent) -> None:
        """Stop strings follow the answer, and deadlines the state: nothing to take down."""
        if isinstance(event, RoundCompleted):
            self._see_results(step, event)
        elif isinstance(event, RequestSeated):
            self._see_seated(event)
        elif isinstance(event, RoundFailed):
            flight = step.before.flight
            if flight is not None and flight.round_id == event.round_id and not flight.aborted:
                self._see_failed(flight.lanes)

    def _see_seated(self, event: RequestSeated) -> None:
        key = (event.request_id, event.choice)
        after_ns = event.at_ns - self._asked_ns.pop(key, event.at_ns)
        self._open.add(key)
        if (held := self.held.pop(event.slot, None)) is not None:
            self._kin.link(held[0], event.request_id, min(event.cached_length, held[1]))
        if key not in self._answers:  # a resumed sequence is seated twice: the first look counts
            self._answers[key] = Answer(
                *key, seated_after_ns=after_ns, slot=event.slot, cached=event.cached_length
            )

    def _see_kin(self, event: RequestArrived) -> None:
        for request in event.requests:
            for shared in request.shared:
                self._kin.link(shared.request_id, request.request_id, shared.length)
            for candidate in request.candidates:
                held = self.held.get(candidate.index)
                if candidate.source == "slot" and held is not None:
                    self._kin.link(held[0], request.request_id, min(candidate.length, held[1]))

    def _see_release(self, step: Step, effect: ReleaseSlot) -> None:
        s = step.before.slots[effect.slot]
        if effect.keep == 0:
            self.held.pop(effect.slot, None)
        elif s is not None:
            self.held[effect.slot] = s.request.request_id, effect.keep

    def _see_results(self, step: Step, event: RoundCompleted) -> None:
        flight = step.before.flight
        if flight is None or flight.round_id != event.round_id:
            return
        for lane, result in zip(flight.lanes, event.results, strict=False):
            key = (lane.request_id, lane.choice)
            if isinstance(result, Failed):
                self._see_failed((lane,))
                continue
            if lane.outputs and result.finish:
                self._see_last(key, result.tokens)
            if lane.outputs > 1:
                self.accepted.setdefault(key, []).append(result.tokens)

    def _see_last(self, key: Key, tokens: int) -> None:
        """The engine says that the text ends, whether or not anybody still wants it."""
        answer = self._answers.get(key)
        if answer is not None:
            tokens_all = self.tokens.get(key, 0) + tokens
            self._answers[key] = replace(answer, tokens=tokens_all, is_late=not tokens)

    def _see_failed(self, lanes: tuple[Lane, ...]) -> None:
        for lane in lanes:
            key = (lane.request_id, lane.choice)
            answer = self._answers.get(key)
            if answer is not None:
                self._answers[key] = replace(answer, fails_at=lane.start + lane.count)

    def _see_end(self, step: Step, effect: FinishChoice) -> None:
        key = (effect.request_id, effect.choice)
        self._open.discard(key)
        answer = self._answers.get(key)
        if answer is None:
            return
        if effect.reason in CUT:
            self._cut += 1
        sent_ns = self._sent_ns.get(key)
        if isinstance(step.event, StopMatched) and effect.reason == "stop" and sent_ns is not None:
            tokens, after_ns = self.tokens[key], step.event.at_ns - sent_ns
            self._answers[key] = replace(answer, tokens=tokens, stop_after_ns=after_ns)

    def _finished(self, key: Key) -> Answer:
        accepted = self.accepted.get(key)
        answer = self._answers[key]
        return answer if accepted is None else replace(answer, accepted=tuple(accepted))
