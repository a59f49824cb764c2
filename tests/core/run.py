"""One run of the core, checked at every step, with a log that questions can be asked of.

Every event goes through `Run.post`: the reducer is asked twice (it must answer the same), the
invariants look at the state and the transition, a Shadow looks at the effects alone, and every
live request is explained.
"""

from msgspec import Struct
from shadow import Shadow

from phaseloop.core.explain import REASONS, explain
from phaseloop.core.invariants import check
from phaseloop.core.reduce import deadline_next, reduce
from phaseloop.core.state import Limits, State, initial
from phaseloop.core.transitions import check_step, live
from phaseloop.core.vocabulary import (
    AnyEffect,
    AnyEvent,
    DeadlineReached,
    DeliverTokens,
    Effects,
    FinishChoice,
    FinishRequest,
    Lane,
    LaunchRound,
    Policy,
    Produced,
    ReleaseSlot,
    RequestArrived,
    RequestSeated,
    RoundCompleted,
    SeatRequest,
    Stop,
)

ROUND_NS = 10_000_000


class Happening(Struct, frozen=True):
    """Something that happened, to somebody, at some time; positions in the log give the order."""

    what: str
    request_id: int | None
    choice: int | None
    at_ns: int
    step: int
    amount: int = 1
    detail: str = ""


class Run:
    def __init__(self, limits: Limits, policy: Policy) -> None:
        self.policy = policy  # the one it began with
        self.state: State = initial(limits, policy)
        self.now_ns = 0
        self.step = 0
        self.seats: list[SeatRequest] = []  # asked for, not answered yet
        self.events: list[AnyEvent] = []
        self.effects: list[Effects] = []
        self.log: list[Happening] = []
        self.faultless = True  # no check has failed so far
        self.ready: set[tuple[int, int]] = set()  # choices whose prompt was once complete
        self.shadow = Shadow(limits, mixes=policy.switch == "mixed")

    def post(self, event: AnyEvent) -> Effects:
        before = self.state
        self.faultless = False
        after, effects = reduce(before, event)
        assert (after, effects) == reduce(before, event), "I10: the same step gave two results"
        check(after)
        check_step(before, event, after, effects)
        self.shadow.observe(event, effects)
        self.explain_everybody(after)
        self.note(before, event, after, effects)
        self.keep_seats(event, effects)
        self.state, self.step = after, self.step + 1
        self.events.append(event)
        self.effects.append(effects)
        self.faultless = True
        return effects

    def explain_everybody(self, state: State) -> None:
        for request_id in sorted(live(state)):
            told = explain(state, request_id, self.now_ns)
            assert told, f"nothing explains where request {request_id} is"
            assert all(one.reason in REASONS for one in told)

    def keep_seats(self, event: AnyEvent, effects: Effects) -> None:
        if isinstance(event, RequestSeated):
            answered = (event.request_id, event.choice, event.slot)
            self.seats = [s for s in self.seats if (s.request_id, s.choice, s.slot) != answered]
        self.seats += [effect for effect in effects if isinstance(effect, SeatRequest)]
        if any(isinstance(effect, Stop) for effect in effects):
            self.seats = []

    # --- a world that answers ---------------------------------------------------------------------

    def answer_seat(self, seat: SeatRequest, cached: int = 0, *, restore: bool = False) -> Effects:
        return self.post(
            RequestSeated(
                at_ns=self.now_ns,
                request_id=seat.request_id,
                choice=seat.choice,
                slot=seat.slot,
                cached_length=cached,
                restore=restore,
            )
        )

    def complete(self, duration_ns: int = ROUND_NS) -> Effects:
        """The round in flight goes well: one token per lane that yields any.

        Where nothing else bounds an answer, that token is its last.
        """
        flight = self.state.flight
        assert flight is not None, "no round is in flight"
        self.now_ns += duration_ns
        results = tuple(
            Produced(min(1, lane.outputs), self.is_endless(lane)) for lane in flight.lanes
        )
        return self.post(
            RoundCompleted(
                at_ns=self.now_ns,
                round_id=flight.round_id,
                results=results,
                duration_ns=duration_ns,
            )
        )

    def is_endless(self, lane: Lane) -> bool:
        s = self.state.slots[lane.slot]
        return bool(lane.outputs) and s is not None and s.output_limit is None

    def answer(self) -> bool:
        """Whatever the world owes first; False where it owes nothing."""
        due_ns = deadline_next(self.state)
        if self.seats:
            self.answer_seat(self.seats[0])
        elif self.state.flight is not None:
            self.complete()
        elif due_ns is not None:
            self.now_ns = max(self.now_ns, due_ns)
            self.post(DeadlineReached(at_ns=self.now_ns))
        else:
            return False
        return True

    def drain(self, steps_max: int = 2000) -> None:
        """Liveness: without new work, a world that answers sees everybody off."""
        for _ in range(steps_max):
            if self.state.stopped or not self.answer():
                break
        else:
            raise AssertionError(f"not drained in {steps_max} steps: {sorted(live(self.state))}")
        assert not live(self.state), f"requests {sorted(live(self.state))} wait for ever"
        self.shadow.assert_drained()

    # --- the log ----------------------------------------------------------------------------------

    def note(self, before: State, event: AnyEvent, after: State, effects: Effects) -> None:
        if isinstance(event, RequestArrived):
            for request in event.requests:
                self.add("arrive", request.request_id, event.at_ns)
        for s in after.slots:
            if s is None or s.role not in ("ready", "generating"):
                continue
            name = (s.request.request_id, s.choice)
            if name not in self.ready:
                self.ready.add(name)
                self.add("ready", s.request.request_id, event.at_ns, s.choice)
        if after.sealed and not before.sealed:
            self.add("seal", None, event.at_ns)
        if after.cohort != before.cohort:
            self.add("cohort", None, event.at_ns)
        if after.policy != before.policy:
            self.add("policy", None, event.at_ns, detail=after.policy.name)
        if after.phase != before.phase:
            self.add(f"enter-{after.phase}", None, event.at_ns)
        for effect in effects:
            self.note_effect(effect, event.at_ns)

    def note_effect(self, effect: AnyEffect, at_ns: int) -> None:
        match effect:
            case LaunchRound():
                self.note_launch(effect, at_ns)
            case DeliverTokens():
                for one in effect.deliveries:
                    who = one.request_id, at_ns, one.choice
                    self.add("token", *who, one.tokens, effect.reason)
            case FinishChoice():
                self.add("end", effect.request_id, at_ns, effect.choice, detail=effect.reason)
            case FinishRequest():
                self.add("finish", effect.request_id, at_ns, detail=effect.reason)
            case SeatRequest():
                who = effect.request_id, at_ns, effect.choice
                self.add("seat", *who, detail=effect.reason)
                if effect.source is not None:
                    self.add("source", *who, detail=effect.source.source)
            case ReleaseSlot():
                what = "evict" if effect.reason == "evicted" else "release"
                self.add(what, None, at_ns, detail=str(effect.slot))
            case Stop():
                self.add("stop", None, at_ns, detail=effect.reason)
            case _:
                self.add(type(effect).__name__.lower(), None, at_ns)

    def note_launch(self, launch: LaunchRound, at_ns: int) -> None:
        self.add("round", None, at_ns, detail=launch.kind)
        for lane in launch.lanes:
            what: str = launch.kind
            if what == "mixed":  # a lane of a mixed round is one or the other
                speaks = (lane.request_id, lane.choice) in self.shadow.spoke
                what = "decode" if speaks else "prefill"
            self.add(what, lane.request_id, at_ns, lane.choice, lane.count, launch.reason)
            if lane.outputs:
                self.add("outputs", lane.request_id, at_ns, lane.choice, lane.outputs)

    def add(
        self,
        what: str,
        request_id: int | None,
        at_ns: int,
        choice: int | None = None,
        amount: int = 1,
        detail: str = "",
    ) -> None:
        self.log.append(Happening(what, request_id, choice, at_ns, self.step, amount, detail))
