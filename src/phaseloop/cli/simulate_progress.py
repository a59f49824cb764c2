"""A bar on stderr while a simulation is long, and nothing where nobody looks at it."""

import sys
from collections.abc import Iterator
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from phaseloop.engine.sim_fields import NS
from phaseloop.sim.arrivals import Arrival
from phaseloop.sim.workload import Workload


class ProgressBar:
    """How far a run is: by arrivals where their number is known, else by virtual time."""

    def __init__(self, workload: Workload, policy: str) -> None:
        self._count = workload.count
        self._end_ns = workload.cut_ns or workload.horizon_ns
        self._arrived = 0
        self._policy = policy
        self._progress: Progress | None = None
        if sys.stderr.isatty():
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[events]:,} events"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            total = 1.0 if self._count or self._end_ns else None
            self._progress.add_task(policy, total=total, events=0)

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def counted(self, arrivals: Iterator[Arrival]) -> Iterator[Arrival]:
        for arrival in arrivals:
            self._arrived += 1
            yield arrival

    def update(self, events: int, now_ns: int) -> None:
        if self._progress is None:
            return
        done = 0.0
        if self._count:
            done = self._arrived / self._count
        elif self._end_ns:
            done = min(1.0, now_ns / self._end_ns)
        text = f"{self._policy}, {now_ns / NS:,.0f} s"
        task = self._progress.task_ids[0]
        self._progress.update(task, completed=done, events=events, description=text)
