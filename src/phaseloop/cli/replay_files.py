"""Where `phaseloop replay` reads from and writes to."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, TextIO

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from phaseloop.sim.replay import Step

from .errors import UserError

PROGRESS_BYTES_MIN = 4 << 20  # a shorter trace is done before a bar would be seen
PROGRESS_EVENTS = 4096


def open_source(path: Path, files: ExitStack) -> BinaryIO:
    return files.enter_context(path.open("rb", buffering=1 << 18))


def create(path: Path, trace: Path, files: ExitStack) -> BinaryIO:
    """Open a file to be written.  Raises UserError where it is the trace itself, or OSError."""
    refuse_same(path, trace)
    return files.enter_context(path.open("wb"))


def create_text(path: Path, trace: Path, files: ExitStack) -> TextIO:
    refuse_same(path, trace)
    return files.enter_context(path.open("w", encoding="utf-8", newline=""))


def refuse_same(path: Path, trace: Path) -> None:
    if path.exists() and path.samefile(trace):
        raise UserError(f"{path} is the trace itself and would be overwritten; name another file")


def write_lines(lines: Iterable[str]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def write_object(fields: dict[str, object]) -> None:
    content = msgspec.json.format(msgspec.json.encode(fields), indent=2)
    sys.stdout.write(content.decode() + "\n")


def with_progress(steps: Iterator[Step], source: BinaryIO, size: int) -> Iterator[Step]:
    """A bar on stderr for long traces, if somebody is there to see it."""
    if size < PROGRESS_BYTES_MIN or not sys.stderr.isatty():
        return steps
    return shown(steps, source, size)


def shown(steps: Iterator[Step], source: BinaryIO, size: int) -> Iterator[Step]:
    columns = (TextColumn("replay"), BarColumn(), TextColumn("{task.percentage:.0f} %"))
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task("replay", total=size)
        for count, step in enumerate(steps):
            if count % PROGRESS_EVENTS == 0:
                progress.update(task, completed=source.tell())
            yield step
