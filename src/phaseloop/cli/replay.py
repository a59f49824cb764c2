"""`phaseloop replay`: run a recorded trace again; check it, explain it, export it, change it."""

import errno
import importlib
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from contextlib import ExitStack
from typing import Protocol, cast

from phaseloop.runtime.trace import TraceError, open_trace
from phaseloop.sim.replay import EXIT_DIVERGED, EXIT_OK, EXIT_UNREADABLE, Fold
from phaseloop.sim.replay_cursor import Cursor, TargetError, parse_target
from phaseloop.sim.replay_diff import difference_lines, first_difference, header_lines

from .errors import UserError, some_path
from .replay_change import change
from .replay_files import refuse_overwriting, write_lines
from .replay_fold import fold_once
from .replay_play import play
from .replay_report import verdict_lines
from .replay_terminal import browse

HELP = "run a recorded trace again: check it, explain it, export it, change it"
DESCRIPTION = """\
Runs the reducer over a recorded trace and compares every decision with the recorded digest.
Exit codes: 0 equal, 1 diverged with the sources that wrote the trace (or --diff found something),
2 unreadable or lacking what was asked for, 3 diverged with other sources."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.add_argument(
        "trace", type=some_path, help="a trace: JSON lines, as serve and simulate write"
    )
    place = parser.add_argument_group("a place in the trace")
    place.add_argument(
        "--until", metavar="PLACE", help="stop after event 120, at 12.5s, or when req:3 arrives"
    )
    place.add_argument("--step", action="store_true", help="step by hand, from the beginning on")
    place.add_argument("--back", action="store_true", help="step by hand, from the end back")
    place.add_argument("--speed", type=float, metavar="N", help="watch it, N times as fast")
    place.add_argument("--follow", action="store_true", help="watch it grow, until its footer")
    place.add_argument("--show", metavar="WHAT", help="state, queue, kv or req:ID at that place")
    place.add_argument("--why", metavar="req:ID", help="the story of a request: why it waited")
    export = parser.add_argument_group("exports")
    export.add_argument("--stats", action="store_true", help="distributions of waits and gaps")
    export.add_argument("--csv", type=some_path, metavar="FILE", help="a row per request")
    export.add_argument("--perfetto", type=some_path, metavar="FILE", help="for ui.perfetto.dev")
    export.add_argument("--html", type=some_path, metavar="FILE", help="a page with the timeline")
    export.add_argument("--timeline", type=some_path, metavar="FILE", help="for the live page")
    export.add_argument("--redact", type=some_path, metavar="FILE", help="a trace fit for sharing")
    other = parser.add_argument_group("comparisons and changes")
    change = other.add_mutually_exclusive_group()
    change.add_argument("--diff", type=some_path, metavar="FILE", help="where another trace parts")
    change.add_argument(
        "--what-if", metavar="CHANGES", help="policy=quantum,tg-quantum-ms=500,max-round-ms=0,..."
    )
    change.add_argument(
        "--inject", metavar="FAULTS", help="cancel@SEQ:req:ID,fail@SEQ,slow=3x@SEQ,lost@SEQ"
    )
    change.add_argument("--shrink", action="store_true", help="to the least that shows --predicate")
    change.add_argument(
        "--engine", action="store_true", help="run the recorded rounds again on --model"
    )
    other.add_argument(
        "-m", "--model", type=some_path, metavar="FILE", help="of a trace of ids: a GGUF"
    )
    other.add_argument(
        "--lora", type=some_path, action="append", metavar="FILE",
        help="of --engine: an adapter that was served, in the order of the command line then",
    )  # fmt: skip
    other.add_argument("-t", "--threads", type=int, metavar="N", help="of --engine (all CPUs)")
    other.add_argument("--predicate", metavar="TEXT", help="'gap_max_ms > 500 and failed == 0'")
    other.add_argument("--tries", type=int, metavar="N", help="runs that --shrink may make (2000)")
    other.add_argument("--cost", metavar="NAME", help="engine, or its file, to take durations from")
    other.add_argument(
        "--out", type=some_path, metavar="FILE", help="gets the trace of the changed run"
    )
    mode = parser.add_argument_group("how")
    mode.add_argument("--force", action="store_true", help="go on past a divergence")
    mode.add_argument("--twice", action="store_true", help="take every step twice and compare")
    mode.add_argument("--check", action="store_true", help="hold every step to the invariants")
    mode.add_argument("--json", action="store_true", help="one JSON object instead of text")


def run(args: Namespace) -> int:
    """Raises UserError, which says what is wrong and carries the exit code."""
    try:
        return replay(args)
    except (TraceError, TargetError) as error:
        raise UserError(str(error), EXIT_UNREADABLE) from None
    except BrokenPipeError:
        raise
    except OSError as error:
        where = error.filename or ("output" if error.errno in FULL else args.trace)
        raise UserError(f"{where}: {error.strerror or error}", EXIT_UNREADABLE) from None


def replay(args: Namespace) -> int:
    check_options(args)
    refuse_overwriting(args)
    if args.engine:
        return engine_module().run_engine(args)
    if args.speed is not None or args.follow:
        return play(args)
    if args.step or args.back:
        return step_by_hand(args)
    if args.diff is not None:
        return compare(args)
    if args.what_if is not None or args.inject is not None or args.shrink:
        return change(args)
    return fold_once(args)


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # nothing that reading a trace can meet
EXPORTS = ("csv", "perfetto", "html", "timeline", "redact")
WATCHED = ("step", "back", "speed", "follow")  # are looked at as they go
CHANGES = ("what_if", "inject", "shrink")
WHOLE = ("diff", "engine", *CHANGES)  # take the whole trace, and show nothing else of it
VIEWS = ("until", "show", "why", "stats", *EXPORTS, "twice", "check")


def check_options(args: Namespace) -> None:
    """No option is silently without effect.  Raises UserError."""
    values = vars(args).items()
    given = {name: value for name, value in values if value is not None and value is not False}
    whole = [name for name in WHOLE if name in given]
    by_hand = [name for name in WATCHED if name in given]
    if whole or by_hand:
        first = (whole or by_hand)[0]
        allowed = ("until",) if not whole else ()
        allowed = (first, *allowed)
        if first in ("speed", "follow"):
            allowed = (*allowed, "speed", "follow")
        others = [n for n in (*VIEWS, *WATCHED) if n in given and n not in allowed]
        if "json" in given and first in ("diff", *WATCHED):
            others.append("json")
        if others:
            raise UserError(f"{option(first)} goes without {', '.join(map(option, others))}")
    needs = {
        "out": CHANGES,
        "cost": CHANGES,
        "predicate": ("shrink",),
        "tries": ("shrink",),
        "model": ("engine",),
        "lora": ("engine",),
        "threads": ("engine",),
    }
    for name, wanted in needs.items():
        if name in given and not any(one in given for one in wanted):
            raise UserError(f"{option(name)} goes with {' or '.join(map(option, wanted))}")
    if args.threads is not None and args.threads < 1:
        raise UserError(f"--threads {args.threads}: must be at least 1")


def option(name: str) -> str:
    return "--" + name.replace("_", "-")


class EngineModule(Protocol):
    run_engine: Callable[[Namespace], int]


def engine_module() -> EngineModule:
    """Imported only when it is asked for, as it needs the extra `cpu`."""
    try:
        return cast(EngineModule, importlib.import_module("phaseloop.cli.replay_engine"))
    except ImportError as error:
        remedy = "install phaseloop with its extra cpu"
        raise UserError(f"--engine: {error.name} is missing; {remedy}") from None


def step_by_hand(args: Namespace) -> int:
    with Cursor(args.trace, force=args.force) as cursor:
        if args.until is not None:
            seq = cursor.find(parse_target(args.until))
        else:
            seq = cursor.end() if args.back else -1
        browse(cursor, seq)
        verdict = cursor.verdict()
        if cursor.broken is not None:
            raise cursor.broken
        if verdict.exit_code != EXIT_OK:
            write_lines(verdict_lines(cursor.reader.header, verdict))
        return verdict.exit_code


def compare(args: Namespace) -> int:
    with ExitStack() as files:
        left = files.enter_context(open_trace(args.trace))
        right = files.enter_context(open_trace(args.diff))
        one, two = Fold(left, force=True), Fold(right, force=True)
        lines = header_lines(left.header, right.header)
        difference = first_difference(one, two)
    if difference is None:
        write_lines([*lines, f"the same {one.events:,} events and decisions"])
        return EXIT_OK
    write_lines([*lines, *difference_lines(difference)])
    return EXIT_DIVERGED
