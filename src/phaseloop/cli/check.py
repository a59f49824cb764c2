"""`phaseloop check`: visit every state of the reducer within bounds, and check every promise."""

import os
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from phaseloop.core.policy import PRESETS
from phaseloop.sim.explore_features import FEATURES, Bounds, setting
from phaseloop.sim.explore_jobs import Job, Outcome, WorkerDied, run_jobs
from phaseloop.sim.explore_trace import write_script

from .check_progress import Display
from .check_report import json_of, print_report
from .errors import UserError

HELP = "visit every state of the reducer within bounds, and check every promise"
EXIT_BROKEN, EXIT_UNFINISHED = 1, 3
SCRIPT = Path("check-violation.jsonl")
DESCRIPTION = """\
Visits every situation that the policy can get into with so many slots, requests and mishaps, each
once, with arrivals, cancels, failures, timers and disconnects at any moment.  On every transition
each promised invariant is checked; from every situation, with an engine that answers and no more
arrivals, every request must end within a stated number of answers."""
EPILOG_START = "features, one run each (all: one after the other):"
EPILOG_END = """\
exit code: 0 every promise holds, 1 one is broken (the shortest script is printed, and written as a
trace for phaseloop replay), 2 bad options, 3 --limit-states was reached before the end"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.epilog = "\n".join((EPILOG_START, *feature_lines(), "", EPILOG_END))
    parser.formatter_class = RawDescriptionHelpFormatter
    default = Bounds()
    bounds = parser.add_argument_group("bounds")
    for name, low, high, text in (
        ("slots", 1, 4, "seats on the engine"),
        ("requests", 1, 8, "that may arrive"),
        ("prompt-rounds", 1, 4, "rounds that a long prompt takes alone"),
        ("tokens", 1, 8, "of an answer"),
        ("cancels", 0, 8, "at any moment"),
        ("failures", 0, 8, "failed lanes and rounds, at any moment"),
    ):
        value = getattr(default, name.replace("-", "_"))
        bounds.add_argument(
            f"--{name}",
            type=integer(low, high),
            default=value,
            metavar="N",
            help=f"{text}; {low} to {high}, by default {value}",
        )
    what = parser.add_argument_group("what is explored")
    what.add_argument(
        "--policy",
        type=names_of("policy", PRESETS),
        default=list(PRESETS),
        metavar="A,B|all",
        help=f"{', '.join(PRESETS)}; by default all",
    )
    what.add_argument(
        "--feature",
        type=names_of("feature", FEATURES),
        default=["base"],
        metavar="A,B|all",
        help="see below; by default base",
    )
    what.add_argument(
        "--limit-states",
        type=integer(1, 10**9),
        metavar="N",
        help="give a run up after so many situations",
    )
    how = parser.add_argument_group("how")
    how.add_argument("--jobs", type=integer(1, 256), metavar="N", help="processes; one per core")
    how.add_argument("--json", action="store_true", help="one object on stdout")
    how.add_argument(
        "--script",
        type=Path,
        default=SCRIPT,
        metavar="FILE",
        help=f"where a violation's script is written; {SCRIPT}",
    )


def feature_lines() -> list[str]:
    width = max(map(len, FEATURES))
    return [f"  {name:<{width}}  {build.__doc__}" for name, build in FEATURES.items()]


def integer(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ArgumentTypeError(f"{text!r} is not an integer from {low} to {high}") from None
        if not low <= value <= high:
            raise ArgumentTypeError(f"{text} is not from {low} to {high}")
        return value

    return parse


def names_of(kind: str, known: Mapping[str, object]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = list(known) if text == "all" else text.split(",")
        for name in names:
            if name not in known:
                raise ArgumentTypeError(f"no {kind} {name!r}; there are all, {', '.join(known)}")
        return list(dict.fromkeys(names))

    return parse


def run(args: Namespace) -> int:
    """Raises UserError where a worker dies or the script cannot be written."""
    bounds = Bounds(
        args.slots, args.requests, args.prompt_rounds, args.tokens, args.cancels, args.failures
    )
    jobs = [
        Job(feature, policy, bounds, args.limit_states)
        for feature in args.feature
        for policy in args.policy
    ]
    try:
        with Display(jobs) as display:
            outcomes = run_jobs(jobs, args.jobs or os.cpu_count() or 1, display.watch)
    except WorkerDied as error:
        raise UserError(f"{error}; fewer --jobs or smaller bounds take less memory") from None
    scripts = write_scripts(outcomes, args.script)
    if args.json:
        sys.stdout.write(json_of(bounds, outcomes, scripts) + "\n")
    else:
        print_report(bounds, outcomes, scripts)
    return exit_code_of(outcomes)


def write_scripts(outcomes: Sequence[Outcome], path: Path) -> dict[Job, Path]:
    """A trace per violation; several get the names of their runs."""
    broken = [outcome for outcome in outcomes if outcome.exploration.violation is not None]
    scripts: dict[Job, Path] = {}
    for outcome in broken:
        job, found = outcome.job, outcome.exploration.violation
        assert found is not None
        own = path
        if len(broken) > 1:
            own = path.with_name(f"{path.stem}.{job.feature}.{job.policy}{path.suffix}")
        state = setting(job.feature, job.bounds, PRESETS[job.policy]).state
        try:
            with own.open("wb") as out:
                write_script(out, state, found)
        except OSError as error:
            raise UserError(f"--script {own}: {error.strerror or error}") from None
        scripts[job] = own
    return scripts


def exit_code_of(outcomes: Sequence[Outcome]) -> int:
    if any(outcome.exploration.violation is not None for outcome in outcomes):
        return EXIT_BROKEN
    if not all(outcome.exploration.complete for outcome in outcomes):
        return EXIT_UNFINISHED
    return 0
