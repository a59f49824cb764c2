"""Long random walks over the reducer: every policy, every feature, everything a world may do.

A hypothesis state machine draws what happens next from what is outstanding.  Each step is checked
by the invariants, by the shadow engine, by reducing it twice and by explaining every live request
(Run.post); when a walk ends, arrivals stop, the world answers whatever it owes, and everybody must
be seen off within a bound that follows from what is left to do.

PHASELOOP_WALKS=5000 walks that often, and elsewhere each time; by default the walks are few and
always the same.
"""

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from run import Run
from strategies import engines, milliseconds, policies, requests, results

from phaseloop.core.reduce import deadline_next
from phaseloop.core.state import Limits
from phaseloop.core.vocabulary import (
    ClientResumed,
    ClientStalled,
    DeadlineReached,
    EngineLost,
    Policy,
    PolicyChanged,
    Request,
    RequestArrived,
    RequestCancelled,
    RoundCompleted,
    RoundFailed,
    ShutdownRequested,
    StopMatched,
)

WALKS = int(os.environ.get("PHASELOOP_WALKS", "0"))


class Walk(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.run: Run | None = None
        self.next_id = 0

    @property
    def it(self) -> Run:
        assert self.run is not None
        return self.run

    @initialize(limits=engines(), policy=policies())
    def begin(self, limits: Limits, policy: Policy) -> None:
        self.run = Run(limits, policy)

    def somebody(self, data: st.DataObject) -> int:
        """Mostly somebody alive, now and then somebody gone or unknown."""
        return data.draw(st.integers(max(0, self.next_id - 6), self.next_id))

    # --- what the world owes ----------------------------------------------------------------------

    @rule(times=st.integers(1, 6))
    def answer(self, times: int) -> None:
        """All goes well for a while."""
        for _ in range(times):
            if not self.it.state.stopped and (self.it.seats or self.it.state.flight):
                self.it.answer()

    @precondition(lambda self: self.it.seats)
    @rule(data=st.data())
    def answer_a_seat(self, data: st.DataObject) -> None:
        seat = data.draw(st.sampled_from(self.it.seats))
        if seat.source is None:
            self.it.answer_seat(seat)
            return
        found = data.draw(st.integers(0, seat.source.length))
        self.it.answer_seat(seat, found, restore=seat.source.source == "snapshot")

    @precondition(lambda self: self.it.state.flight)
    @rule(data=st.data(), duration_ns=milliseconds)
    def complete(self, data: st.DataObject, duration_ns: int) -> None:
        run, flight = self.it, self.it.state.flight
        assert flight is not None
        run.now_ns += duration_ns
        run.post(
            RoundCompleted(
                at_ns=run.now_ns,
                round_id=flight.round_id,
                results=data.draw(results(flight.lanes)),
                duration_ns=duration_ns,
            )
        )

    @precondition(lambda self: deadline_next(self.it.state) is not None)
    @rule()
    def deadline(self) -> None:
        due_ns = deadline_next(self.it.state)
        assert due_ns is not None
        self.it.now_ns = max(self.it.now_ns, due_ns)
        self.it.post(DeadlineReached(at_ns=self.it.now_ns))

    # --- what it may do ---------------------------------------------------------------------------

    @rule(data=st.data(), together=st.sampled_from([1, 1, 1, 2]))
    def arrive(self, data: st.DataObject, together: int) -> None:
        calls: list[Request] = []
        for _ in range(together):
            calls.append(data.draw(requests(self.next_id, self.it.state)))
            self.next_id += 1
        self.it.post(RequestArrived(at_ns=self.it.now_ns, requests=tuple(calls)))

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.it.post(RequestCancelled(at_ns=self.it.now_ns, request_id=self.somebody(data)))

    @rule(data=st.data(), choice=st.sampled_from([0, 0, 1]))
    def stop(self, data: st.DataObject, choice: int) -> None:
        who = self.somebody(data)
        self.it.post(StopMatched(at_ns=self.it.now_ns, request_id=who, choice=choice))

    @rule(data=st.data())
    def stall(self, data: st.DataObject) -> None:
        self.it.post(ClientStalled(at_ns=self.it.now_ns, request_id=self.somebody(data)))

    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        self.it.post(ClientResumed(at_ns=self.it.now_ns, request_id=self.somebody(data)))

    @rule(policy=policies())
    def change_policy(self, policy: Policy) -> None:
        self.it.post(PolicyChanged(at_ns=self.it.now_ns, policy=policy))

    @rule(elapsed_ns=milliseconds)
    def time_passes(self, elapsed_ns: int) -> None:
        self.it.now_ns += elapsed_ns
        self.it.post(DeadlineReached(at_ns=self.it.now_ns))

    @precondition(lambda self: self.it.state.flight)
    @rule()
    def fail_the_round(self) -> None:
        flight = self.it.state.flight
        assert flight is not None
        self.it.post(RoundFailed(at_ns=self.it.now_ns, round_id=flight.round_id, reason="drawn"))

    @rule(back=st.integers(1, 3))
    def complete_a_past_round(self, back: int) -> None:
        run = self.it
        round_id = run.state.round_id_next - 1 - back
        before = run.state
        run.post(RoundFailed(at_ns=run.now_ns, round_id=round_id, reason="late"))
        run.post(RoundCompleted(at_ns=run.now_ns, round_id=round_id, results=(), duration_ns=1))
        assert run.state.flight == before.flight

    @precondition(lambda self: self.next_id > 8)
    @rule(lost=st.booleans())
    def end(self, lost: bool) -> None:
        now_ns = self.it.now_ns
        lose = EngineLost(at_ns=now_ns, reason="drawn")
        self.it.post(lose if lost else ShutdownRequested(at_ns=now_ns))

    def teardown(self) -> None:
        if self.run is not None and self.run.faultless:
            self.run.drain(bound(self.run))


def bound(run: Run) -> int:
    """Steps in which everybody must be gone: a few for each token that is still to come.

    Every round moves somebody on by a token at least.  Moving a sequence to host RAM and back for
    want of a page takes a handful of steps, and buys at least one token.
    """
    tokens = 0
    for request in run.shadow.requests.values():
        if request.request_id not in run.shadow.answered:
            most = run.shadow.limits.context_length - request.prompt_length
            output = most if request.output_limit is None else request.output_limit
            tokens += request.choices * (request.prompt_length + output + 1)
    return 20 + 8 * tokens


walking = settings(
    max_examples=WALKS or 60,
    stateful_step_count=60,
    derandomize=not WALKS,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
Walk.TestCase.settings = walking
TestWalk = pytest.mark.timeout(300)(Walk.TestCase)  # a failing walk is shrunk for long
