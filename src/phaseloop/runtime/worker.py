"""The engine's worker: where effects that take time are carried out, and reported as events.

The contract, which virtual_worker.py keeps too.  Calls return at once and never raise.  The engine
sees them one at a time, in order.  Each round is answered by RoundCompleted or RoundFailed, each
seat by RequestSeated, or all of them by one EngineLost, after which nothing more is answered.  An
exception from a round fails that round; one from a seat costs its cached prefix; `EngineDied`, or
the end of the thread, loses the engine.

Seats and releases that were asked for while a round ran are done when it ends, and reported
*before* its completion: so the step that plans the next round knows the newcomers and takes them
along.
"""

import asyncio
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Protocol, TypeAlias

from phaseloop.core.vocabulary import (
    AbortRound,
    AnyEvent,
    DropSaved,
    LaunchRound,
    ReleaseSlot,
    SeatRequest,
)
from phaseloop.engine.protocol import Content, Engine, EngineDied, Outcome

from .calls import (
    NONE_GENERATED,
    Answer,
    Choice,
    Completed,
    Generated,
    GeneratedByChoice,
    Job,
    Lost,
    SeatJob,
    describe,
    do_quick,
    event_of,
    generated,
    run_round,
)
from .clock import Clock

Post: TypeAlias = Callable[[AnyEvent], None]


class Worker(Protocol):
    def launch(self, launch: LaunchRound) -> None: ...
    def abort(self, abort: AbortRound) -> None: ...
    def seat(self, seat: SeatRequest, content: Content) -> None: ...
    def release(self, release: ReleaseSlot) -> None: ...
    def drop(self, drop: DropSaved) -> None: ...

    def generated(self, choice: Choice, count: int) -> Generated:
        """The first `count` tokens that the last completed round gave a choice."""
        ...


class ThreadWorker:
    """One thread per engine.  All methods but the thread's own belong to the event loop's thread.

    The hand-over holds at most `job_count_max` jobs.  The reducer has one round and a few jobs per
    slot outstanding, plus one per sequence it saved, so an overrun means that the engine hangs: it
    is reported as lost.
    """

    def __init__(
        self, engine: Engine, clock: Clock, post: Post, *, job_count_max: int = 4096
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._post = post
        self._job_count_max = job_count_max
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._generated: GeneratedByChoice = {}
        self._is_lost = False
        # A daemon: an engine that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    def launch(self, launch: LaunchRound) -> None:
        self._hand_over(launch)

    def seat(self, seat: SeatRequest, content: Content) -> None:
        self._hand_over(SeatJob(seat, content))

    def release(self, release: ReleaseSlot) -> None:
        self._hand_over(release)

    def drop(self, drop: DropSaved) -> None:
        self._hand_over(drop)

    def abort(self, abort: AbortRound) -> None:
        try:
            self._engine.abort(abort.round_id)
        except Exception as error:
            self._report((Lost(f"abort of round {abort.round_id}: {describe(error)}"),))

    def generated(self, choice: Choice, count: int) -> Generated:
        return self._generated.get(choice, NONE_GENERATED).first(count)

    async def close(self) -> None:
        """Let the thread finish what it is at, and wait for its end.

        Cancel the call to leave a hung engine behind; it will not keep the process alive.
        """
        self._is_lost = True  # nobody is left to hear of it
        self._jobs.put(None)
        await self._ended.wait()
        self._thread.join()  # it has made its last call; this takes no time

    def _hand_over(self, job: Job) -> None:
        if self._is_lost:
            return
        if self._jobs.qsize() >= self._job_count_max:
            self._report((Lost(f"the engine has left {self._job_count_max} jobs undone"),))
            return
        self._jobs.put(job)

    # --- on the engine's thread -------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                answers, is_last = self._do(job)
                self._send(answers)
                if is_last:
                    return
        except EngineDied as error:
            self._send((Lost(str(error)),))
        except BaseException as error:  # whatever ends the thread ends the engine
            self._send((Lost(f"the engine's thread ended: {describe(error)}"),))
        finally:
            self._call_loop(self._ended.set)

    def _do(self, job: Job) -> tuple[tuple[Answer, ...], bool]:
        """The answers to a job, and whether the worker was told to end meanwhile."""
        if not isinstance(job, LaunchRound):
            return do_quick(self._engine, job), False
        start_ns = self._clock.now_ns()
        answer = run_round(self._engine, job)
        if isinstance(answer, Outcome):
            answer = Completed(job, answer, self._clock.now_ns() - start_ns)
        waiting, is_last = self._do_waiting()
        return (*waiting, answer), is_last

    def _do_waiting(self) -> tuple[tuple[Answer, ...], bool]:
        """Whatever was handed over while the round ran; another round cannot be among it."""
        answers: list[Answer] = []
        try:
            while (job := self._jobs.get_nowait()) is not None:
                assert not isinstance(job, LaunchRound), "at most one round is in flight"
                answers += do_quick(self._engine, job)
        except Empty:
            return tuple(answers), False
        return tuple(answers), True

    def _send(self, answers: tuple[Answer, ...]) -> None:
        if answers:
            self._call_loop(lambda: self._report(answers))

    def _call_loop(self, call: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            assert self._loop.is_closed(), "only a closed loop takes no calls"

    # --- back on the event loop's thread ----------------------------------------------------------

    def _report(self, answers: tuple[Answer, ...]) -> None:
        for answer in answers:
            if self._is_lost:
                return
            if isinstance(answer, Completed):
                self._generated = generated(answer.launch, answer.outcome)
            self._is_lost = isinstance(answer, Lost)
            self._post(event_of(answer, self._clock.now_ns()))
