"""How far the check of the weights is: a bar on a terminal, a line in the log now and then else."""

import sys
import time
from collections.abc import Callable
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from .serve_loaded import Reporter

LINE_EVERY_NS = 2_000_000_000


class CheckProgress:
    """Use it as a context manager around the check.  Lengths are bytes."""

    def __init__(
        self, length: int, reporter: Reporter, clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._reporter = reporter
        self._clock_ns = clock_ns
        self._told_ns = clock_ns()
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("checking weights"),
                BarColumn(),
                DownloadColumn(binary_units=True),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._bar.add_task("", total=length)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def at(self, done: int, length: int) -> None:
        """Raises Interrupted if nobody waits any more."""
        self._reporter.check()
        if self._bar is not None:
            self._bar.update(self._task, completed=done)
        elif self._clock_ns() - self._told_ns >= LINE_EVERY_NS:
            self._told_ns = self._clock_ns()
            self._reporter.say("loading", checked=f"{done / length:.0%}")
