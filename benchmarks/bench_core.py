"""The reducer with 10,000 requests queued: arrival, cancel, and rounds of 4 and 64 lanes."""

import random
from collections.abc import Callable
from functools import cache

from harness import Samples, figure, per_call

from phaseloop.core.policy import PRESETS
from phaseloop.core.reduce import reduce
from phaseloop.core.state import Limits, State, initial
from phaseloop.core.vocabulary import (
    AnyEvent,
    Effects,
    LaunchRound,
    Produced,
    Request,
    RequestArrived,
    RequestCancelled,
    RequestSeated,
    RoundCompleted,
    SeatRequest,
)

QUEUED = 10_000
MS = 1_000_000


@cache
def crowded(slots: int) -> State:
    """Every slot generates, a decode round is in flight, and 10,000 requests wait."""
    limits = Limits(slots, 2048, 8192, 64 * slots, queue_length_max=2 * QUEUED)
    state = initial(limits, PRESETS["barrier-fair"])
    answers: list[AnyEvent] = [arrived(n) for n in range(slots)]
    launches = 0
    while launches < 6:
        state, effects = reduce(state, answers.pop(0))
        answers += answers_to(effects)
        launches += sum(isinstance(effect, LaunchRound) for effect in effects)
    for n in range(slots, slots + QUEUED):
        state, _ = reduce(state, arrived(n, at_ns=10 * MS + n))
    assert state.flight is not None and state.flight.kind == "decode"
    assert (len(state.queue), len(state.flight.lanes)) == (QUEUED, slots)
    return state


def arrived(request_id: int, at_ns: int = 0) -> RequestArrived:
    """Half of them with a deadline, so that the timers are busy too."""
    deadline_ns = 60_000 * MS + request_id % 977 if request_id % 2 else None
    request = Request(request_id, 100, output_limit=400, deadline_after_ns=deadline_ns)
    return RequestArrived(at_ns=at_ns, requests=(request,))


def answers_to(effects: Effects) -> list[AnyEvent]:
    answers: list[AnyEvent] = []
    for effect in effects:
        if isinstance(effect, SeatRequest):
            answers.append(
                RequestSeated(
                    at_ns=0, request_id=effect.request_id, choice=effect.choice, slot=effect.slot
                )
            )
        elif isinstance(effect, LaunchRound):
            answers.append(completed(effect.round_id, [lane.outputs for lane in effect.lanes]))
    return answers


def completed(round_id: int, tokens: list[int], ends: int | None = None) -> RoundCompleted:
    results = tuple(Produced(n, finish=i == ends) for i, n in enumerate(tokens))
    return RoundCompleted(at_ns=11_000 * MS, round_id=round_id, results=results, duration_ns=MS)


def reducing(state: State, events: list[AnyEvent]) -> Callable[[], object]:
    """A call that reduces one of the events, each time from the same state."""
    draw = random.Random(1)
    return lambda: reduce(state, draw.choice(events))


def rounds(slots: int) -> Samples:
    """Rounds of a full house; in one of twenty somebody's text ends."""
    state = crowded(slots)
    assert state.flight is not None
    usual: AnyEvent = completed(state.flight.round_id, [1] * slots)
    last: list[AnyEvent] = [
        completed(state.flight.round_id, [1] * slots, ends=lane) for lane in range(slots)
    ]
    return per_call(reducing(state, [usual] * (19 * slots) + last))


@figure("reduce: arrival, 10,000 queued", unit="µs", at_most=20)
def arrival() -> Samples:
    events: list[AnyEvent] = [arrived(50_000, at_ns=11_000 * MS)]
    return per_call(reducing(crowded(4), events))


@figure("reduce: cancel, 10,000 queued", unit="µs", at_most=20)
def cancel() -> Samples:
    events: list[AnyEvent] = [
        RequestCancelled(at_ns=11_000 * MS, request_id=n) for n in range(4, QUEUED)
    ]
    return per_call(reducing(crowded(4), events))


@figure("reduce: round of 4 lanes, 10,000 queued", unit="µs", at_most=25)
def round_of_4() -> Samples:
    return rounds(4)


@figure("reduce: round of 64 lanes, 10,000 queued", unit="µs", at_most=100, p99_at_most=250)
def round_of_64() -> Samples:
    return rounds(64)
