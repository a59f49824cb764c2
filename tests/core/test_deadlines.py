"""When the core wants to be called: when the first of its promises runs out, and never in vain."""

from hypothesis import given
from hypothesis import strategies as st
from run import Run

from phaseloop.core.policy import PRESETS
from phaseloop.core.reduce import deadline_next
from phaseloop.core.state import Limits
from phaseloop.core.vocabulary import (
    ClientResumed,
    ClientStalled,
    DeadlineReached,
    Request,
    RequestArrived,
    RequestCancelled,
    ShutdownRequested,
)

MS = 1_000_000
LIMITS = Limits(1, 16, 64, 64, page_length=4, client_stall_ns=70 * MS, shutdown_grace_ns=40 * MS)


def begin() -> Run:
    return Run(LIMITS, PRESETS["barrier-fair"])


def arrive(run: Run, *requests: Request) -> None:
    run.post(RequestArrived(at_ns=run.now_ns, requests=requests))
    while run.seats:
        run.answer_seat(run.seats[0])


def test_nothing_to_wait_for() -> None:
    run = begin()
    assert deadline_next(run.state) is None
    arrive(run, Request(0, 4, output_limit=2))
    assert deadline_next(run.state) is None


def test_a_seat_keeps_the_deadline_and_ends_the_queue_wait() -> None:
    run = begin()
    arrive(run, Request(0, 4, deadline_after_ns=90 * MS, queue_wait_ns_max=20 * MS))
    assert deadline_next(run.state) == 90 * MS
    arrive(run, Request(1, 4, deadline_after_ns=80 * MS, queue_wait_ns_max=20 * MS))
    assert deadline_next(run.state) == 20 * MS
    run.post(RequestCancelled(at_ns=0, request_id=1))
    assert deadline_next(run.state) == 90 * MS


def test_stalls_count_from_the_stall_and_go_with_it() -> None:
    run = begin()
    arrive(run, Request(0, 4, output_limit=9, deadline_after_ns=200 * MS))
    run.complete()
    run.complete()
    run.post(ClientStalled(at_ns=25 * MS, request_id=0))
    assert deadline_next(run.state) == 95 * MS
    run.post(ClientResumed(at_ns=30 * MS, request_id=0))
    assert deadline_next(run.state) == 200 * MS


def test_the_grace_of_a_shutdown() -> None:
    run = begin()
    arrive(run, Request(0, 4, output_limit=9, deadline_after_ns=30 * MS))
    run.post(ShutdownRequested(at_ns=5 * MS))
    assert deadline_next(run.state) == 30 * MS
    run.post(RequestCancelled(at_ns=6 * MS, request_id=0))
    assert deadline_next(run.state) == 45 * MS
    run.complete()
    assert run.state.stopped
    assert deadline_next(run.state) is None


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20))
def test_queued_requests_expire_exactly_when_due(waits: list[int]) -> None:
    """Called back whenever it asks, the core ends each request at its own time and not before."""
    run = begin()
    arrive(run, Request(0, 4, output_limit=30))
    for i, wait in enumerate(waits, 1):
        arrive(run, Request(i, 4, queue_wait_ns_max=wait))
    while (due_ns := deadline_next(run.state)) is not None:
        run.now_ns = due_ns
        run.post(DeadlineReached(at_ns=due_ns))
    ended = {one.request_id: one.at_ns for one in run.log if one.what == "finish"}
    assert ended == dict(enumerate(waits, 1))


@given(st.integers(1, 50), st.integers(0, 60))
def test_early_calls_change_nothing_and_late_ones_catch_up(wait: int, called: int) -> None:
    run = begin()
    arrive(run, Request(0, 4, output_limit=30))
    arrive(run, Request(1, 4, queue_wait_ns_max=wait))
    before = run.state
    run.now_ns = called
    run.post(DeadlineReached(at_ns=called))
    if called < wait:
        assert run.state == before
    else:
        assert [one.request_id for one in run.log if one.what == "finish"] == [1]
