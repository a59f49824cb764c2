"""Goal: the environment owes exactly what was asked of it, and every event can come about.

Method: events that are offered in states written by hand, and a walk through the worlds of all
features that notes what is offered for each effect that waits for an answer.
"""

from typing import get_args

from msgspec.structs import replace

from phaseloop.core.policy import PRESETS
from phaseloop.core.reduce import deadline_next, reduce
from phaseloop.core.state import Limits, State, initial
from phaseloop.core.vocabulary import (
    COMPLETIONS,
    AnyEvent,
    ClientResumed,
    ClientStalled,
    DeadlineReached,
    EngineLost,
    Event,
    Failed,
    LaunchRound,
    Produced,
    Request,
    RequestArrived,
    RequestCancelled,
    RequestSeated,
    RoundCompleted,
    RoundFailed,
    SeatRequest,
    Shared,
    StopMatched,
)
from phaseloop.sim.enabled import TICK_NS, Alphabet, World, after, answers, enabled, surprises
from phaseloop.sim.explore_features import FEATURES, Bounds, setting
from phaseloop.sim.stale import stale

LIMITS = Limits(slot_count=2, batch_tokens=4, context_length=16, page_count=32, page_length=1)
REQUEST = Request(0, prompt_length=2, output_limit=2, keep_cache=False)


def world_of(*requests: Request, **changes: object) -> tuple[State, World]:
    alphabet = Alphabet(requests, tuple((i,) for i in range(len(requests))))
    state = initial(LIMITS, PRESETS["barrier-fair"])
    return state, replace(World(alphabet, requests=len(requests)), **changes)


def moved(state: State, world: World, event: AnyEvent) -> tuple[State, World]:
    state, effects = reduce(state, event)
    return state, after(world, event, effects)


def first(events, kind: type[Event]) -> AnyEvent:
    return next(event for event in events if isinstance(event, kind))


def kinds(events) -> list[type[Event]]:
    return [type(event) for event in events]


def until_answer(*kinds_wanted: type[Event], **changes: object) -> tuple[State, World]:
    """Answer with the first of each kind in turn."""
    state, world = world_of(REQUEST, **changes)
    for kind in kinds_wanted:
        state, world = moved(state, world, first(enabled(state, world), kind))
    return state, world


# --- one step at a time ---------------------------------------------------------------------------


def test_an_empty_world_offers_arrivals_alone():
    state, world = world_of(REQUEST, replace(REQUEST, prompt_length=3))
    assert list(answers(state, world)) == []
    offered = list(surprises(state, world))
    assert kinds(offered) == [RequestArrived, RequestArrived]
    assert [event.requests[0].prompt_length for event in offered] == [2, 3]


def test_ids_go_on_and_shared_prefixes_name_the_one_before():
    follower = replace(REQUEST, shared=(Shared(-1, 1),))
    state, world = world_of(follower, requests=2)
    arrived = [first(enabled(state, world), RequestArrived)]
    state, world = moved(state, world, arrived[0])
    arrived.append(first(enabled(state, world), RequestArrived))
    requests = [event.requests[0] for event in arrived]
    assert [r.request_id for r in requests] == [0, 1]
    assert [r.shared for r in requests] == [(), (Shared(0, 1),)]


def test_a_seat_is_answered_for_once():
    state, world = until_answer(RequestArrived)
    assert [seat.slot for seat in world.seats] == [0]
    assert kinds(answers(state, world)) == [RequestSeated]
    state, world = moved(state, world, first(answers(state, world), RequestSeated))
    assert world.seats == () and world.launch is not None


def test_a_round_is_answered_in_every_way_that_matters():
    state, world = until_answer(RequestArrived, RequestSeated, RoundCompleted, failures=1)
    assert world.launch is not None and world.launch.kind == "sample"
    owed = [event.results for event in answers(state, world)]
    assert owed == [(Produced(1),), (Produced(0, True),), (Produced(1, True),)]
    trouble = [e for e in surprises(state, world) if isinstance(e, RoundCompleted | RoundFailed)]
    assert [getattr(event, "results", None) for event in trouble] == [(Failed("injected"),), None]


def test_no_more_lanes_fail_than_the_budget_has():
    state, world = world_of(REQUEST, REQUEST, failures=1)
    for kind in (RequestArrived, RequestArrived, RequestSeated, RequestSeated):
        state, world = moved(state, world, first(enabled(state, world), kind))
    assert world.launch is not None and len(world.launch.lanes) == 2
    failed = [
        sum(isinstance(result, Failed) for result in event.results)
        for event in surprises(state, world)
        if isinstance(event, RoundCompleted)
    ]
    assert set(failed) == {1}
    spent = after(world, first(surprises(state, world), RoundCompleted), ())
    assert spent.failures == 0 and spent.launch is None


def test_an_aborted_round_may_fail_for_free():
    state, world = until_answer(RequestArrived, RequestSeated, RequestCancelled, cancels=1)
    assert world.aborted and world.failures == 0 and world.cancels == 0
    assert RoundFailed in kinds(answers(state, world))
    _, world = moved(state, world, first(answers(state, world), RoundFailed))
    assert not world.aborted and world.failures == 0


def test_stop_strings_are_found_only_in_text():
    state, world = until_answer(RequestArrived, RequestSeated, RoundCompleted)
    assert StopMatched not in kinds(enabled(state, world))
    state, world = moved(state, world, first(answers(state, world), RoundCompleted))
    assert StopMatched in kinds(enabled(state, world))


def test_a_client_stalls_on_budget_and_resumes_for_free():
    state, world = until_answer(RequestArrived)
    world = replace(world, alphabet=replace(world.alphabet, stalls=True), extras=1)
    state, world = moved(state, world, first(enabled(state, world), ClientStalled))
    assert world.extras == 0
    offered = kinds(enabled(state, world))
    assert ClientResumed in offered and ClientStalled not in offered


def test_time_passes_only_where_a_threshold_is_ahead():
    state, world = world_of(replace(REQUEST, queue_wait_ns_max=TICK_NS), REQUEST)
    assert {event.at_ns for event in enabled(state, world)} == {0}
    hurried = replace(REQUEST, deadline_after_ns=2 * TICK_NS)
    state, world = world_of(hurried, REQUEST)
    state, world = moved(state, world, first(enabled(state, world), RequestArrived))
    others = {e.at_ns for e in enabled(state, world) if not isinstance(e, DeadlineReached)}
    assert others == {0, TICK_NS}
    # Too early, while a seat is still owed, and too late.
    due = [e.at_ns for e in enabled(state, world) if isinstance(e, DeadlineReached)]
    assert due == [0, 2 * TICK_NS, 3 * TICK_NS]


def test_a_due_deadline_is_owed_once_nothing_else_is():
    hurried = replace(REQUEST, queue_wait_ns_max=TICK_NS)
    state, world = world_of(hurried)
    full = replace(LIMITS, slot_count=1)
    busy = replace(initial(full, PRESETS["barrier-fair"]), linger_until_ns=TICK_NS)
    assert deadline_next(busy) == TICK_NS
    assert [(type(e), e.at_ns) for e in answers(busy, world)] == [(DeadlineReached, TICK_NS)]
    assert list(answers(state, world)) == []


def test_after_the_end_only_what_was_in_the_mailbox_comes():
    state, world = until_answer(RequestArrived)
    world = replace(world, alphabet=replace(world.alphabet, engine_loss=True), extras=1, requests=1)
    state, world = moved(state, world, first(enabled(state, world), EngineLost))
    assert world.stopped and world.seats == ()
    assert kinds(enabled(state, world)) == [RequestArrived]


def test_stale_events_are_about_nobody():
    state, world = until_answer(RequestArrived, RequestSeated)
    assert world.launch is not None
    for event in stale(state, world):
        assert getattr(event, "round_id", None) != world.launch.round_id
        assert getattr(event, "request_id", None) != 0


# --- all of it ------------------------------------------------------------------------------------


def test_every_event_and_every_completion_can_come_about():
    offered: set[type[Event]] = set()
    completed: dict[type, set[type[Event]]] = {LaunchRound: set(), SeatRequest: set()}
    for feature in FEATURES:
        where = setting(feature, Bounds(2, 1, 1, 2, 1, 1), PRESETS["barrier-fair"])
        layer = [(where.state, where.world)]
        for _ in range(5):
            following: list[tuple[State, World]] = []
            for state, world in layer:
                for event in enabled(state, world):
                    offered.add(type(event))
                    state_after, world_after = moved(state, world, event)
                    following.append((state_after, world_after))
                    if world.launch is not None and world_after.launch is not world.launch:
                        completed[LaunchRound].add(type(event))
                    if len(world_after.seats) < len(world.seats):
                        completed[SeatRequest].add(type(event))
            layer = following[:500]
    assert offered == set(get_args(AnyEvent))
    for effect, events in COMPLETIONS.items():
        assert set(events) <= completed[effect]
