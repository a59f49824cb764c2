"""Goal: in virtual time the worker keeps the same contract, and durations and aborts are exact.

Method: a scripted engine with stated durations, and the events that come out of the clock.
"""

import pytest
from scripted import MS, ScriptedEngine

from phaseloop.core.vocabulary import (
    AbortRound,
    AnyEvent,
    EngineLost,
    Lane,
    LaunchRound,
    Produced,
    ReleaseSlot,
    RequestSeated,
    RoundCompleted,
    RoundFailed,
    SeatRequest,
)
from phaseloop.engine.protocol import Content, EngineDied, RoundError
from phaseloop.runtime.clock import VirtualClock
from phaseloop.runtime.virtual_worker import VirtualWorker

LAUNCH = LaunchRound(0, "decode", (Lane(0, 3, 0, 8, 1, 1),), "generate")
SEAT = SeatRequest(5, 0, 1, None, "oldest")


class Office:
    def __init__(self, **options: int) -> None:
        self.engine = ScriptedEngine(**options)
        self.clock = VirtualClock()
        self.worker = VirtualWorker(self.engine, self.clock)

    def drain(self) -> list[AnyEvent]:
        events: list[AnyEvent | None] = []
        while self.clock.next_ns() is not None:
            item = self.clock.pop()
            events.append(item() if callable(item) else item)
        return [event for event in events if event is not None]

    def abort_at(self, at_ns: int) -> None:
        self.clock.call_at(at_ns, lambda: self.worker.abort(AbortRound(0, "lanes_left")))


def test_a_round_takes_as_long_as_the_engine_says():
    office = Office(duration_ns=7 * MS)
    office.clock.advance(2 * MS)
    office.worker.launch(LAUNCH)
    assert office.worker.generated((3, 0), 1).ids == (), "not before the round's end"
    (event,) = office.drain()
    assert event == RoundCompleted(
        at_ns=9 * MS, round_id=0, results=(Produced(1),), duration_ns=7 * MS
    )
    assert office.worker.generated((3, 0), 1).ids == (3000,)


def test_seats_are_answered_at_once_even_while_a_round_runs():
    office = Office()
    office.worker.launch(LAUNCH)
    office.worker.seat(SEAT, Content())
    seated, completed = office.drain()
    assert seated == RequestSeated(at_ns=0, request_id=5, choice=0, slot=1)
    assert isinstance(completed, RoundCompleted)


@pytest.mark.parametrize(
    ("step_ns", "abort_at_ns", "end_ns"),
    [
        (3 * MS, 4 * MS, 6 * MS),  # at the engine's next look
        (3 * MS, 3 * MS, 3 * MS),  # just in time for it
        (3 * MS, 0, 0),
    ],
)
def test_an_aborted_round_ends_where_the_engine_looks_next(step_ns, abort_at_ns, end_ns):
    office = Office(duration_ns=10 * MS, step_ns=step_ns)
    office.worker.launch(LAUNCH)
    office.abort_at(abort_at_ns)
    assert office.drain() == [RoundFailed(at_ns=end_ns, round_id=0, reason="aborted")]


@pytest.mark.parametrize(("step_ns", "abort_at_ns"), [(3 * MS, 9 * MS + 1), (None, 1)])
def test_an_abort_that_comes_to_nothing_leaves_the_round_alone(step_ns, abort_at_ns):
    office = Office(duration_ns=10 * MS, step_ns=step_ns)
    office.worker.launch(LAUNCH)
    office.abort_at(abort_at_ns)
    (event,) = office.drain()
    assert isinstance(event, RoundCompleted)
    assert event.at_ns == 10 * MS


def test_an_abort_of_another_round_is_ignored():
    office = Office(duration_ns=10 * MS, step_ns=MS)
    office.worker.launch(LAUNCH)
    office.worker.abort(AbortRound(1, "lanes_left"))
    (event,) = office.drain()
    assert isinstance(event, RoundCompleted)


def test_a_failed_round_fails_when_the_engine_says():
    office = Office()

    def fail(launch: LaunchRound) -> None:
        raise RoundError("scripted", duration_ns=4 * MS)

    office.engine.on_run = fail
    office.worker.launch(LAUNCH)
    assert office.drain() == [RoundFailed(at_ns=4 * MS, round_id=0, reason="scripted")]


def test_a_dead_engine_answers_nothing_more():
    office = Office(duration_ns=5 * MS)
    office.worker.launch(LAUNCH)

    def die(slot: int) -> None:
        raise EngineDied("device lost")

    office.engine.on_release = die
    office.worker.release(ReleaseSlot(1, 0, 1, "evicted"))
    office.worker.seat(SEAT, Content())
    assert office.drain() == [EngineLost(at_ns=0, reason="device lost")]


def test_an_engine_that_dies_in_a_round():
    office = Office()

    def die(launch: LaunchRound) -> None:
        raise EngineDied("device lost")

    office.engine.on_run = die
    office.worker.launch(LAUNCH)
    office.worker.launch(LAUNCH)
    assert office.drain() == [EngineLost(at_ns=0, reason="device lost")]
