"""What the explorations of `phaseloop check` are doing, on stderr, while somebody looks at it."""

import sys
from collections.abc import Sequence
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.progress import TimeElapsedColumn as Elapsed

from phaseloop.sim.explore_jobs import Job, Outcome, Report


class Display:
    """A bar over the runs, and a line for each that is under way; nothing without a terminal."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._tasks: dict[Job, TaskID] = {}
        self._progress: Progress | None = None
        if sys.stderr.isatty():
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[seen]}"),
                Elapsed(),
                console=Console(stderr=True),
                transient=True,
            )
            self._all = self._progress.add_task("runs", total=len(jobs), seen="")

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def watch(self, job: Job, message: Report | Outcome) -> None:
        progress = self._progress
        if progress is None:
            return
        if isinstance(message, Outcome):
            progress.advance(self._all)
            if job in self._tasks:
                progress.remove_task(self._tasks.pop(job))
            return
        if job not in self._tasks:
            name = f"{job.feature}, {job.policy}"
            self._tasks[job] = progress.add_task(name, total=None, seen="")
        seen = f"{message.states:,} states, {message.transitions:,} transitions"
        progress.update(self._tasks[job], completed=message.states, seen=seen)
