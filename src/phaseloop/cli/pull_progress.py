"""How far a download is, on stderr: a bar on a terminal, a few plain lines otherwise."""

import sys
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.progress import TransferSpeedColumn as Speed

LINES = 4  # without a terminal, over the whole


class Transfer:
    """Use it as a context manager; `at` says how many bytes are there."""

    def __init__(self, label: str, length: int) -> None:
        self._label = label
        self._length = length
        self._lines_left = list(range(1, LINES))
        self._progress: Progress | None = None
        if sys.stderr.isatty():
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(),
                Speed(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._progress.add_task(label, total=length)

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        else:
            say(f"{self._label} {megabytes(self._length)}")
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def at(self, done: int) -> None:
        if self._progress is not None:
            self._progress.update(self._task, completed=done)
            return
        is_due = False
        while self._lines_left and done * LINES >= self._lines_left[0] * self._length:
            self._lines_left.pop(0)
            is_due = True
        if is_due:
            say(f"{self._label} {megabytes(self._length)}: {done / self._length:.0%}")


def say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def megabytes(length: int) -> str:
    return f"{length / 1e6:,.0f} MB" if length >= 1e6 else f"{length / 1e3:,.1f} kB"
