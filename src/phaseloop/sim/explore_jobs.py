"""Explorations side by side: one process each, a few at a time, results in the order asked for.

Processes are spawned, not forked: the parent may draw a progress display from a thread, and a fork
would copy its locks in whatever state they are.  Each worker reports through its own pipe, so one
that dies is noticed as the end of its pipe, and ends nothing but its own exploration.
"""

import multiprocessing
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Literal, TypeAlias

from msgspec import Struct

from phaseloop.core.invariants import promises
from phaseloop.core.policy import PRESETS

from .explore import Exploration, explore
from .explore_features import Bounds, setting

Verdict: TypeAlias = Literal["holds", "broken", "undecided", "not promised"]
INVARIANTS = tuple(f"I{number}" for number in range(1, 13))
SECONDS_BETWEEN_REPORTS = 0.2


class Job(Struct, frozen=True):
    """One feature under one policy."""

    feature: str
    policy: str
    bounds: Bounds
    limit_states: int | None = None


class Outcome(Struct, frozen=True):
    job: Job
    exploration: Exploration
    seconds: float

    @property
    def verdicts(self) -> dict[str, Verdict]:
        """By invariant; `core` is the state's own shape, which no policy is excused from."""
        promised = (*promises(PRESETS[self.job.policy]), "core")
        return {name: self.verdict(name, promised) for name in (*INVARIANTS, "core")}

    def verdict(self, name: str, promised: Sequence[str]) -> Verdict:
        violation = self.exploration.violation
        if violation is not None and violation.invariant == name:
            return "broken"
        if name not in promised:
            return "not promised"
        return "holds" if self.exploration.complete else "undecided"


class Report(Struct, frozen=True):
    """How far an exploration is."""

    states: int
    transitions: int


Watch: TypeAlias = Callable[[Job, Report | Outcome], None]


class WorkerDied(Exception):
    """A worker process ended without a result: out of memory, or killed."""


def run_jobs(jobs: Sequence[Job], worker_count: int, watch: Watch) -> list[Outcome]:
    """Explore each job in a process of its own, at most `worker_count` at a time.

    `watch` is called, here, for every report and outcome.  One worker needs no process.  Raises
    WorkerDied.
    """
    if worker_count == 1 or len(jobs) == 1:
        return [run_here(job, watch) for job in jobs]
    waiting = list(enumerate(jobs))[::-1]
    running: dict[Connection, tuple[int, Job, SpawnProcess]] = {}
    outcomes: dict[int, Outcome] = {}
    try:
        while waiting or running:
            while waiting and len(running) < worker_count:
                index, job = waiting.pop()
                connection, process = spawn(job)
                running[connection] = (index, job, process)
            for connection in wait(list(running)):
                assert isinstance(connection, Connection)
                index, job, process = running[connection]
                message = received(connection, job)
                watch(job, message)
                if isinstance(message, Outcome):
                    outcomes[index] = message
                    process.join()
                    del running[connection]
    finally:
        for _, _, process in running.values():
            process.terminate()
    return [outcomes[index] for index in range(len(jobs))]


def received(connection: Connection, job: Job) -> Report | Outcome:
    try:
        return connection.recv()
    except EOFError:
        what = f"the exploration of {job.feature} under {job.policy}"
        raise WorkerDied(f"{what} ended without a result") from None


def spawn(job: Job) -> tuple[Connection, SpawnProcess]:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(job, sender), daemon=True)
    process.start()
    sender.close()  # ours; the end of the pipe is then the worker's end
    return receiver, process


def work(job: Job, sender: Connection) -> None:
    """A worker's life."""

    def watch(_: Job, message: Report | Outcome) -> None:
        sender.send(message)

    try:
        run_here(job, watch)
    except KeyboardInterrupt:
        pass  # the terminal told the whole group; the parent says so
    finally:
        sender.close()


def run_here(job: Job, watch: Watch) -> Outcome:
    start = reported = time.perf_counter()
    where = setting(job.feature, job.bounds, PRESETS[job.policy])

    def progress(states: int, transitions: int) -> None:
        nonlocal reported
        now = time.perf_counter()
        if now - reported >= SECONDS_BETWEEN_REPORTS:
            reported = now
            watch(job, Report(states, transitions))

    exploration = explore(
        where.state,
        where.world,
        where.bound,
        limit_states=job.limit_states,
        progress=progress,
    )
    outcome = Outcome(job, exploration, time.perf_counter() - start)
    watch(job, outcome)
    return outcome
