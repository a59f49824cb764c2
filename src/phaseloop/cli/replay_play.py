"""A trace as it happens: a screen in a terminal, a line per event and effect elsewhere.

`--speed N` plays a recorded trace N times as fast as it was; `--follow` waits for what a live
server appends, until the footer.
"""

import sys
import time
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from io import BufferedReader
from typing import BinaryIO, cast

from rich.console import Console
from rich.live import Live
from rich.text import Text

from phaseloop.runtime.trace import Reader
from phaseloop.sim.replay import EXIT_OK, Fold, Step
from phaseloop.sim.replay_cursor import parse_target, upto
from phaseloop.sim.replay_show import Show, show_lines
from phaseloop.sim.replay_text import SECOND, effect_text, event_text, time_text

from .errors import UserError
from .replay_files import open_source, write_lines
from .replay_report import verdict_lines
from .replay_terminal import step_lines

POLL_S = 0.1
EVENTS_SHOWN = 8
FRAMES_PER_S = 20
FOOTER = b'{"line":"footer"'

Sleep = Callable[[float], None]


def play(args: Namespace, sleep: Sleep = time.sleep) -> int:
    """Raises UserError, TraceError or OSError."""
    if args.speed is not None and not args.speed > 0:
        raise UserError(f"--speed {args.speed}: must be more than 0")
    target = None if args.until is None else parse_target(args.until)
    with ExitStack() as files:
        source = open_source(args.trace, files)
        if args.follow:
            source = cast(BinaryIO, Following(cast(BufferedReader, source), sleep))
        fold = Fold(Reader(args.trace, source), force=args.force)
        steps = upto(iter(fold), target)
        if args.speed is not None:
            steps = paced(steps, args.speed, sleep)
        if sys.stdout.isatty():
            show_screen(steps)
        else:
            for step in steps:
                write_lines(step_lines(step))
                sys.stdout.flush()
    verdict = fold.verdict()
    if verdict.exit_code != EXIT_OK:
        write_lines(verdict_lines(fold.reader.header, verdict))
    return verdict.exit_code


class Following:
    """A file that grows: a line is there once its newline is, and none comes after the footer."""

    def __init__(self, source: BufferedReader, sleep: Sleep) -> None:
        self._source = source
        self._sleep = sleep
        self._is_over = False

    def readline(self, limit: int) -> bytes:
        if self._is_over:
            return b""
        line = self._source.readline(limit)
        while not line.endswith(b"\n") and len(line) < limit:
            self._sleep(POLL_S)
            line += self._source.readline(limit - len(line))
        self._is_over = line.startswith(FOOTER)
        return line

    def close(self) -> None:
        self._source.close()


def paced(steps: Iterator[Step], speed: float, sleep: Sleep) -> Iterator[Step]:
    """Each step as long after the one before as it was recorded, divided by `speed`."""
    last_ns: int | None = None
    for step in steps:
        at_ns = step.event.at_ns
        if last_ns is not None and at_ns > last_ns:
            sleep((at_ns - last_ns) / SECOND / speed)
        last_ns = at_ns
        yield step


def show_screen(steps: Iterator[Step]) -> None:
    recent: deque[str] = deque(maxlen=EVENTS_SHOWN)
    with Live(console=Console(), refresh_per_second=FRAMES_PER_S) as live:
        for step in steps:
            recent.append(f"{time_text(step.event.at_ns)}  {event_text(step.event)}")
            live.update(Text("\n".join(screen_lines(step, recent)), overflow="ellipsis"))


def screen_lines(step: Step, recent: deque[str]) -> list[str]:
    """The state, the last few events, and what the last one led to."""
    now_ns = step.event.at_ns
    return [
        f"{time_text(now_ns)}, event {step.seq}",
        *show_lines(Show("state"), step.after, now_ns),
        "",
        *recent,
        *(f"  -> {effect_text(effect)}" for effect in step.effects),
    ]
