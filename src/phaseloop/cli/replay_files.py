"""Where `phaseloop replay` reads from and writes to."""

import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from io import TextIOWrapper
from pathlib import Path
from typing import BinaryIO, TextIO

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from phaseloop.runtime import output
from phaseloop.sim.replay import Step

from .errors import UserError

PROGRESS_BYTES_MIN = 4 << 20  # a shorter trace is done before a bar would be seen
PROGRESS_EVENTS = 4096
OUTPUTS = ("csv", "html", "out", "perfetto", "redact", "timeline")


def open_source(path: Path, files: ExitStack) -> BinaryIO:
    return files.enter_context(path.open("rb", buffering=1 << 18))


def create(path: Path, files: ExitStack) -> BinaryIO:
    """Open a file to be written.  Raises OSError, which names it."""
    return files.enter_context(output.create(path))


def create_text(path: Path, files: ExitStack) -> TextIO:
    return files.enter_context(TextIOWrapper(output.create(path), encoding="utf-8", newline=""))


def refuse_overwriting(args: Namespace) -> None:
    """No output is an input, nor two outputs one file.  Raises UserError."""
    inputs = {"the trace": args.trace, "--diff": args.diff, "--model": args.model}
    outputs = {name: vars(args)[name] for name in OUTPUTS if vars(args)[name] is not None}
    for name, path in outputs.items():
        for what, source in inputs.items():
            if source is not None and is_same(path, source):
                raise UserError(f"--{name} {path} would overwrite {what}; name another file")
        for other, second in outputs.items():
            if other < name and is_same(path, second):
                raise UserError(f"--{other} and --{name} would both write {path}; name two files")


def is_same(left: Path, right: Path) -> bool:
    if left.exists() and right.exists():
        return left.is_file() and left.samefile(right)  # devices and pipes take anything
    return left.resolve() == right.resolve()


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
