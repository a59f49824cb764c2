"""Goal: both drivers give the reducer the same events in the same order, and effects in theirs.

Method: a scripted engine in virtual time; the asyncio driver runs on an event loop that jumps.
"""

import asyncio
import errno
from io import BytesIO

import pytest
from scripted import (
    MS,
    BareWorld,
    LoopSchedule,
    ScriptedEngine,
    VirtualLoop,
    arrival,
    header_for,
    run_virtually,
)

from phaseloop.core.invariants import Violation
from phaseloop.core.vocabulary import (
    AnyEffect,
    AnyEvent,
    DeadlineReached,
    DeliverTokens,
    FinishRequest,
    LaunchRound,
    RequestCancelled,
    RequestSeated,
    RoundCompleted,
    ShutdownRequested,
    Stop,
)
from phaseloop.runtime import loop as loop_module
from phaseloop.runtime.clock import AsyncioClock
from phaseloop.runtime.loop import Stepper, run, run_virtual
from phaseloop.runtime.mailbox import Mailbox
from phaseloop.runtime.trace import Recorded, TraceWriter, open_trace
from phaseloop.runtime.virtual_worker import VirtualWorker


def recorded(out: BytesIO, tmp_path) -> list[AnyEvent]:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(out.getvalue())
    with open_trace(path) as reader:
        return [one.event for _, one in reader if isinstance(one, Recorded)]


def finishes(world: BareWorld) -> list[tuple[int, str]]:
    return [(e.request_id, e.reason) for e in world.effects if isinstance(e, FinishRequest)]


# --- virtual time ---------------------------------------------------------------------------------


def test_a_request_runs_to_its_end_and_the_loop_to_its_stop():
    world = BareWorld(ScriptedEngine(length=2))
    world.clock.post(arrival(5 * MS, 0))
    world.clock.post(ShutdownRequested(at_ns=100 * MS))
    assert run_virtual(world.stepper, world.clock) == Stop(0, "shutdown")
    assert finishes(world) == [(0, "stop")]
    delivered = [e for e in world.effects if isinstance(e, DeliverTokens)]
    assert sum(d.tokens for e in delivered for d in e.deliveries) == 2


def test_without_anything_to_come_the_run_ends():
    world = BareWorld(ScriptedEngine())
    world.clock.post(arrival(0, 0))
    assert run_virtual(world.stepper, world.clock) is None
    assert finishes(world) == [(0, "stop")]


def test_callbacks_of_the_world_run_at_their_time_and_may_answer_with_an_event():
    world = BareWorld(ScriptedEngine())
    world.clock.call_at(7, lambda: arrival(world.clock.now_ns(), 0))
    world.clock.call_at(8, lambda: None)
    run_virtual(world.stepper, world.clock)
    assert finishes(world) == [(0, "stop")]
    assert world.stepper.at_ns > 8


def waiting_world(out: BytesIO, *posts: AnyEvent) -> BareWorld:
    """Two slots are taken by long requests; request 2 waits at most 10 ms for a seat."""
    world = BareWorld(ScriptedEngine(length=1000, duration_ns=4 * MS), out=out)
    for request_id in (0, 1):
        world.clock.post(arrival(0, request_id, output_limit=9))
    world.clock.post(arrival(0, 2, queue_wait_ns_max=10 * MS))
    for event in posts:
        world.clock.post(event)
    return world


def test_a_deadline_is_an_event_at_its_own_time(tmp_path):
    out = BytesIO()
    world = waiting_world(out)
    run_virtual(world.stepper, world.clock)
    world.stepper.close("end", 0)
    times = [e.at_ns for e in recorded(out, tmp_path) if isinstance(e, DeadlineReached)]
    assert times == [10 * MS]
    assert finishes(world)[0] == (2, "queue_timeout")


def test_what_is_stamped_with_the_deadline_comes_before_it(tmp_path):
    out = BytesIO()
    world = waiting_world(out, RequestCancelled(at_ns=10 * MS, request_id=2))
    run_virtual(world.stepper, world.clock)
    world.stepper.close("end", 0)
    assert not [e for e in recorded(out, tmp_path) if isinstance(e, DeadlineReached)]
    assert finishes(world)[0] == (2, "cancelled")


def test_a_deadline_without_effect_is_told_once_per_event(monkeypatch):
    monkeypatch.setattr(loop_module, "deadline_next", lambda state: 3 * MS)
    world = BareWorld(ScriptedEngine())
    stepper = world.stepper
    assert stepper.deadline_ns() == 3 * MS
    stepper.step(DeadlineReached(at_ns=3 * MS))
    assert stepper.deadline_ns() is None
    stepper.step(RequestCancelled(at_ns=4 * MS, request_id=9))
    assert stepper.deadline_ns() == 4 * MS, "overdue, and never in the past"


def test_an_event_from_the_past_is_a_fault_of_the_shell():
    world = BareWorld(ScriptedEngine())
    world.stepper.step(RequestCancelled(at_ns=5, request_id=0))
    with pytest.raises(AssertionError, match="goes back in time"):
        world.stepper.step(RequestCancelled(at_ns=4, request_id=0))


# --- the order of a step --------------------------------------------------------------------------


class Diary:
    """A trace file that remembers when it was written, between the effects of the same step."""

    def __init__(self) -> None:
        self.entries: list[str] = []

    def write(self, content: bytes) -> int:
        self.entries.append("write")
        return len(content)

    def flush(self) -> None:
        self.entries.append("flush")


def test_the_file_has_the_event_before_the_engine_has_the_round():
    diary = Diary()
    world = BareWorld(ScriptedEngine(), out=diary)
    perform = world.perform

    def noted(effect: AnyEffect) -> None:
        diary.entries.append(type(effect).__name__)
        perform(effect)

    world.stepper._perform = noted
    world.clock.post(arrival(0, 0))
    run_virtual(world.stepper, world.clock)
    launches = [i for i, entry in enumerate(diary.entries) if entry == "LaunchRound"]
    assert len(launches) == 5
    for i in launches:
        assert diary.entries[i - 2 : i] == ["write", "flush"]
    assert diary.entries.count("write") == len(launches), "nothing else is written eagerly"


def test_a_launch_that_breaks_a_promise_is_not_performed(monkeypatch, tmp_path):
    def refuse(state: object, launch: object) -> None:
        raise Violation("I1", "a decode round in the prefill phase")

    monkeypatch.setattr(loop_module, "check_launch", refuse)
    out, engine = BytesIO(), ScriptedEngine()
    world = BareWorld(engine, out=out)
    world.clock.post(arrival(0, 0))
    with pytest.raises(Violation):
        run_virtual(world.stepper, world.clock)
    assert engine.launches == []
    assert recorded(out, tmp_path)[-1] == RequestSeated(at_ns=0, request_id=0, choice=0, slot=0)
    assert b'"reason":"fault","exit_code":70' in out.getvalue()


def test_the_event_that_breaks_the_reducer_is_in_the_trace(monkeypatch, tmp_path):
    real = loop_module.reduce

    def reduce(state: object, event: AnyEvent) -> object:
        assert not isinstance(event, RoundCompleted), "a fault"
        return real(state, event)

    monkeypatch.setattr(loop_module, "reduce", reduce)
    out = BytesIO()
    world = BareWorld(ScriptedEngine(), out=out)
    world.clock.post(arrival(0, 0))
    with pytest.raises(AssertionError, match="a fault"):
        run_virtual(world.stepper, world.clock)
    assert isinstance(recorded(out, tmp_path)[-1], RoundCompleted)
    assert b'"reason":"fault","exit_code":70' in out.getvalue()


def test_closing_twice_writes_one_footer():
    out = BytesIO()
    world = BareWorld(ScriptedEngine(), out=out)
    world.stepper.close("shutdown", 0)
    world.stepper.close("fault", 70)
    assert out.getvalue().count(b'"line":"footer"') == 1


class FullDisk(BytesIO):
    def write(self, content: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_ends_a_run_that_is_only_about_its_trace():
    world = BareWorld(ScriptedEngine(), out=FullDisk())
    world.clock.post(arrival(0, 0))
    with pytest.raises(OSError, match="No space left"):
        run_virtual(world.stepper, world.clock)


def test_a_full_disk_does_not_end_a_server():
    world = BareWorld(ScriptedEngine())
    lost: list[OSError] = []
    state = world.stepper.state
    trace = TraceWriter(FullDisk(), header_for(state), state)
    world.stepper = Stepper(state, world.perform, trace, lost.append)
    world.clock.post(arrival(0, 0))
    run_virtual(world.stepper, world.clock)
    world.stepper.close("shutdown", 0)
    assert finishes(world) == [(0, "stop")]
    assert [error.errno for error in lost] == [errno.ENOSPC]


# --- asyncio --------------------------------------------------------------------------------------


class LiveWorld(BareWorld):
    """The same, driven by asyncio."""

    def __init__(self, engine: ScriptedEngine, out: BytesIO | None = None) -> None:
        super().__init__(engine, out=out)
        self.schedule = LoopSchedule()
        self.mailbox, self.post = self.schedule.mailbox, self.schedule.post
        self.worker = VirtualWorker(engine, self.schedule)


EVENTS: tuple[AnyEvent, ...] = (
    arrival(0, 0, output_limit=9),
    arrival(1 * MS, 1, output_limit=9),
    arrival(2 * MS, 2, queue_wait_ns_max=10 * MS),
    RequestCancelled(at_ns=21 * MS, request_id=1),
    ShutdownRequested(at_ns=90 * MS),
)


def test_asyncio_and_virtual_time_agree():
    live_out, virtual_out = BytesIO(), BytesIO()

    async def main() -> Stop:
        world = LiveWorld(ScriptedEngine(length=1000, duration_ns=4 * MS), live_out)
        for event in EVENTS:
            world.schedule.loop.call_at(event.at_ns / 1e9, world.post, event)
        stop = await run(world.stepper, world.mailbox)
        world.stepper.close("end", 0)
        return stop

    assert run_virtually(main()) == Stop(0, "shutdown")
    world = BareWorld(ScriptedEngine(length=1000, duration_ns=4 * MS), out=virtual_out)
    for event in EVENTS:
        world.clock.post(event)
    run_virtual(world.stepper, world.clock)
    world.stepper.close("end", 0)
    assert live_out.getvalue().splitlines() == virtual_out.getvalue().splitlines()
    assert b"DeadlineReached" in live_out.getvalue()


def test_whoever_posted_in_time_gets_an_answer_after_the_stop():
    async def main() -> LiveWorld:
        world = LiveWorld(ScriptedEngine())
        world.post(ShutdownRequested(at_ns=0))
        world.post(arrival(0, 0))
        world.post(arrival(0, 1))
        await run(world.stepper, world.mailbox)
        world.post(arrival(0, 2))  # too late: nobody reads it
        return world

    assert finishes(run_virtually(main())) == [(0, "shutdown"), (1, "shutdown")]


def test_a_fault_ends_the_run_and_closes_the_mailbox(monkeypatch):
    def reduce(state: object, event: AnyEvent) -> object:
        raise AssertionError("a fault")

    monkeypatch.setattr(loop_module, "reduce", reduce)

    async def main() -> bool:
        world = LiveWorld(ScriptedEngine())
        world.post(arrival(0, 0))
        with pytest.raises(AssertionError, match="a fault"):
            await run(world.stepper, world.mailbox)
        return world.mailbox.is_closed

    assert run_virtually(main())


def test_a_busy_mailbox_does_not_delay_a_deadline():
    async def main() -> list[AnyEvent]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        mailbox = Mailbox(AsyncioClock(loop.time_ns))
        for at_ns in (1, 5, 6):
            mailbox.post(RequestCancelled(at_ns=at_ns, request_id=0))
        return [await mailbox.next(5), await mailbox.next(5), await mailbox.next(5)]

    first, second, third = run_virtually(main())
    assert (first.at_ns, second.at_ns) == (1, 5)
    assert third == DeadlineReached(at_ns=5), "before the event stamped later"


def test_a_wait_is_cut_short_by_a_post():
    async def main() -> tuple[AnyEvent, int]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        mailbox = Mailbox(AsyncioClock(loop.time_ns))
        loop.call_at(0.003, lambda: mailbox.post(ShutdownRequested(at_ns=3 * MS)))
        return await mailbox.next(10 * MS), loop.time_ns()

    assert run_virtually(main()) == (ShutdownRequested(at_ns=3 * MS), 3 * MS)


def test_the_launches_of_a_fair_cohort_never_mix():
    world = BareWorld(ScriptedEngine())
    for request_id in range(6):
        world.clock.post(arrival(request_id * MS, request_id, prompt_length=100))
    run_virtual(world.stepper, world.clock)
    kinds = {e.kind for e in world.effects if isinstance(e, LaunchRound)}
    assert kinds == {"prefill", "sample", "decode"}
