"""Goal: whatever an engine does, every effect that takes time is answered, and nothing blocks.

Method: a real thread and a scripted engine whose calls raise, or wait at a gate the test opens.
"""

import asyncio
import itertools
import logging
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from scripted import ScriptedEngine

from phaseloop.core.vocabulary import (
    AbortRound,
    AnyEvent,
    Candidate,
    DropSaved,
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
from phaseloop.engine.protocol import Content, EngineDied, Outcome, RoundError, Seated
from phaseloop.runtime.worker import ThreadWorker

GATE_S_MAX = 10


class CountingClock:
    """Every reading is 1 ns later than the one before, on whatever thread."""

    def __init__(self) -> None:
        self._readings = itertools.count()

    def now_ns(self) -> int:
        return next(self._readings)


class Office:
    """A worker and the mailbox it answers to."""

    def __init__(self, engine: ScriptedEngine, job_count_max: int = 100) -> None:
        self.events: asyncio.Queue[AnyEvent] = asyncio.Queue()
        self.worker = ThreadWorker(
            engine, CountingClock(), self.events.put_nowait, job_count_max=job_count_max
        )

    async def next(self) -> AnyEvent:
        async with asyncio.timeout(GATE_S_MAX):
            return await self.events.get()


@asynccontextmanager
async def office(engine: ScriptedEngine, **options: int) -> AsyncIterator[Office]:
    opened = Office(engine, **options)
    try:
        yield opened
    finally:
        await opened.worker.close()


def launch(round_id: int = 0, request_id: int = 0) -> LaunchRound:
    lane = Lane(0, request_id, 0, 8, 1, 1)
    return LaunchRound(round_id, "decode", (lane,), "generate")


def seat(request_id: int = 5) -> SeatRequest:
    return SeatRequest(request_id, 0, 1, None, "oldest")


def raising(error: BaseException) -> Callable[[object], None]:
    def on_call(_: object) -> None:
        raise error

    return on_call


def answers(engine: ScriptedEngine, *jobs: LaunchRound | SeatRequest | ReleaseSlot) -> list:
    """The events that a few jobs lead to, one each."""

    async def main() -> list[AnyEvent]:
        async with office(engine) as here:
            events = []
            for job in jobs:
                hand_over(here.worker, job)
                if not isinstance(job, ReleaseSlot):
                    events.append(await here.next())
            return events

    return asyncio.run(main())


def hand_over(worker: ThreadWorker, job: LaunchRound | SeatRequest | ReleaseSlot) -> None:
    match job:
        case LaunchRound():
            worker.launch(job)
        case SeatRequest():
            worker.seat(job, Content((1, 2), seed=9))
        case ReleaseSlot():
            worker.release(job)


# --- answers --------------------------------------------------------------------------------------


def test_a_round_is_answered_with_its_results_and_measured_duration():
    (event,) = answers(ScriptedEngine(), launch(7))
    assert isinstance(event, RoundCompleted)
    assert (event.round_id, event.results) == (7, (Produced(1),))
    assert event.duration_ns == 1, "one reading of the clock before, one after"
    assert event.at_ns > 1, "stamped when it comes back to the loop"


def test_a_seat_is_answered_with_what_the_engine_found():
    engine = ScriptedEngine()
    engine.seat = lambda seat, content: Seated(len(content.tokens), restore=True)
    (event,) = answers(engine, seat(5))
    assert event == RequestSeated(
        at_ns=event.at_ns, request_id=5, choice=0, slot=1, cached_length=2, restore=True
    )


def test_releases_and_drops_reach_the_engine_in_order():
    engine = ScriptedEngine()

    async def main() -> None:
        async with office(engine) as here:
            here.worker.release(ReleaseSlot(1, 64, 3, "finished"))
            here.worker.drop(DropSaved(5, 1, "cancelled"))
            here.worker.release(ReleaseSlot(0, 0, 4, "evicted"))
            here.worker.launch(launch())
            await here.next()

    asyncio.run(main())
    assert engine.releases == [(1, 64, 3), (0, 0, 4)]
    assert engine.drops == [(5, 1)]


def test_token_ids_wait_for_their_delivery():
    async def main() -> list[tuple[int, ...]]:
        async with office(ScriptedEngine()) as here:
            here.worker.launch(launch(0, request_id=3))
            await here.next()
            choice, other = (3, 0), (4, 0)
            first = [here.worker.generated(choice, 1).ids, here.worker.generated(choice, 0).ids]
            return [*first, here.worker.generated(other, 1).ids]

    assert asyncio.run(main()) == [(3000,), (), ()]


def test_what_was_asked_during_a_round_is_reported_before_its_end():
    engine, gate = ScriptedEngine(), threading.Event()
    engine.on_run = lambda launch: gate.wait(GATE_S_MAX)

    async def main() -> list[AnyEvent]:
        async with office(engine) as here:
            here.worker.launch(launch())
            here.worker.release(ReleaseSlot(1, 0, 1, "evicted"))
            here.worker.seat(seat(), Content())
            gate.set()
            return [await here.next(), await here.next()]

    first, second = asyncio.run(main())
    assert (type(first), type(second)) == (RequestSeated, RoundCompleted)
    assert first.at_ns <= second.at_ns


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("bad row"), "ValueError: bad row"),
        (KeyError(), "KeyError"),
        (MemoryError("no room"), "MemoryError: no room"),
        (RoundError("scripted"), "scripted"),
    ],
)
def test_an_exception_fails_its_round_and_no_other(error, reason):
    engine = ScriptedEngine()
    engine.on_run = lambda launch: raising(error)(launch) if launch.round_id == 0 else None
    failed, completed = answers(engine, launch(0), launch(1))
    assert failed == RoundFailed(at_ns=failed.at_ns, round_id=0, reason=reason)
    assert isinstance(completed, RoundCompleted)


@pytest.mark.parametrize(
    "outcome", [Outcome(()), Outcome((Produced(),) * 2), Outcome((Produced(1),), ((1,), (2,)))]
)
def test_an_outcome_of_the_wrong_shape_fails_the_round(outcome):
    engine = ScriptedEngine()
    engine.run = lambda launch: outcome
    (failed,) = answers(engine, launch())
    assert isinstance(failed, RoundFailed)
    assert "for 1 lanes" in failed.reason


def test_a_seat_that_fails_begins_empty(caplog):
    engine = ScriptedEngine()
    engine.on_seat = raising(ValueError("no such snapshot"))
    wanted = SeatRequest(5, 0, 1, Candidate("slot", 1, 8, 100), "cache")
    with caplog.at_level(logging.ERROR):
        seated, completed = answers(engine, wanted, launch())
    assert seated == RequestSeated(at_ns=seated.at_ns, request_id=5, choice=0, slot=1)
    assert engine.releases == [(1, 0, 8)]
    assert isinstance(completed, RoundCompleted)
    assert "request 5 begins without its cache" in caplog.text


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (EngineDied("device lost"), "device lost"),
        (SystemExit(3), "the engine's thread ended: SystemExit: 3"),
    ],
)
def test_a_dead_engine_is_reported_once_and_asked_nothing_more(error, reason):
    engine = ScriptedEngine()
    engine.on_run = raising(error)

    async def main() -> tuple[AnyEvent, bool]:
        async with office(engine) as here:
            here.worker.launch(launch())
            lost = await here.next()
            here.worker.seat(seat(), Content())
            here.worker.launch(launch(1))
        return lost, here.events.empty()

    lost, nothing_more = asyncio.run(main())
    assert lost == EngineLost(at_ns=lost.at_ns, reason=reason)
    assert nothing_more
    assert len(engine.launches) == 1


def test_a_seat_fails_the_engine_where_even_emptying_the_slot_fails():
    engine = ScriptedEngine()
    engine.on_seat = raising(ValueError("bad"))
    engine.on_release = raising(OSError("worse"))
    (lost,) = answers(engine, seat())
    assert lost == EngineLost(at_ns=lost.at_ns, reason="SeatJob: OSError: worse")


def test_memory_that_cannot_be_released_loses_the_engine():
    engine = ScriptedEngine()
    engine.on_release = raising(RuntimeError("double free"))

    async def main() -> AnyEvent:
        async with office(engine) as here:
            here.worker.release(ReleaseSlot(0, 0, 1, "finished"))
            return await here.next()

    lost = asyncio.run(main())
    assert lost == EngineLost(at_ns=lost.at_ns, reason="ReleaseSlot: RuntimeError: double free")


def test_an_engine_that_hangs_is_lost_when_its_jobs_pile_up():
    engine, gate = ScriptedEngine(), threading.Event()
    engine.on_run = lambda launch: gate.wait(GATE_S_MAX)

    async def main() -> list[AnyEvent]:
        async with office(engine, job_count_max=3) as here:
            here.worker.launch(launch())
            for _ in range(9):
                here.worker.release(ReleaseSlot(1, 0, 1, "evicted"))
            lost = await here.next()
            gate.set()
        return [lost, *(here.events.get_nowait() for _ in range(here.events.qsize()))]

    (lost,) = asyncio.run(main())
    assert lost == EngineLost(at_ns=lost.at_ns, reason="the engine has left 3 jobs undone")


# --- abort and end --------------------------------------------------------------------------------


def test_an_abort_reaches_the_engine_while_the_round_runs():
    engine, stopped = ScriptedEngine(), threading.Event()

    def until_aborted(launch: LaunchRound) -> None:
        assert stopped.wait(GATE_S_MAX)
        raise RoundError("aborted")

    engine.on_run = until_aborted
    engine.on_abort = lambda round_id: stopped.set()

    async def main() -> AnyEvent:
        async with office(engine) as here:
            here.worker.launch(launch(4))
            here.worker.abort(AbortRound(4, "lanes_left"))
            return await here.next()

    event = asyncio.run(main())
    assert event == RoundFailed(at_ns=event.at_ns, round_id=4, reason="aborted")
    assert engine.aborts == [4]


def test_an_abort_that_raises_loses_the_engine():
    engine = ScriptedEngine()
    engine.on_abort = raising(ValueError("which round?"))

    async def main() -> AnyEvent:
        async with office(engine) as here:
            here.worker.abort(AbortRound(4, "shutdown"))
            return await here.next()

    lost = asyncio.run(main())
    assert lost == EngineLost(at_ns=lost.at_ns, reason="abort of round 4: ValueError: which round?")


def test_closing_waits_for_the_round_and_reports_it_to_nobody():
    engine, gate = ScriptedEngine(), threading.Event()
    engine.on_run = lambda launch: gate.wait(GATE_S_MAX)

    async def main() -> bool:
        here = Office(engine)
        here.worker.launch(launch())
        closing = asyncio.create_task(here.worker.close())
        asyncio.get_running_loop().call_soon(gate.set)
        await closing
        return here.events.empty()

    assert asyncio.run(main())
    assert not [thread for thread in threading.enumerate() if thread.name == "engine"]


def test_an_engine_that_outlives_the_loop_ends_in_silence():
    engine, gate = ScriptedEngine(), threading.Event()
    engine.on_run = lambda launch: gate.wait(GATE_S_MAX)

    async def main() -> ThreadWorker:
        here = Office(engine)
        here.worker.launch(launch())
        closing = asyncio.create_task(here.worker.close())
        closing.cancel()
        return here.worker

    worker = asyncio.run(main())
    gate.set()
    worker._jobs.put(None)
    worker._thread.join(GATE_S_MAX)
    assert not worker._thread.is_alive()
