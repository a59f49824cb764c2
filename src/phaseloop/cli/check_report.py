"""What `phaseloop check` prints: a table and the shortest scripts for people, JSON for programs."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from phaseloop.core.invariants import promises
from phaseloop.core.policy import PRESETS
from phaseloop.core.reduce import reduce
from phaseloop.sim.explore import Exploration, Found
from phaseloop.sim.explore_features import Bounds, setting
from phaseloop.sim.explore_jobs import Job, Outcome
from phaseloop.sim.replay_text import effect_text, event_text, time_text

Scripts = Mapping[Job, Path]
STYLES = {"holds": "green", "broken": "bold red", "undecided": "yellow"}


# --- for programs ---------------------------------------------------------------------------------


def json_of(bounds: Bounds, outcomes: Sequence[Outcome], scripts: Scripts) -> str:
    report = {
        "bounds": bounds,
        "holds": all(outcome.exploration.complete for outcome in outcomes),
        "runs": [json_of_run(outcome, scripts.get(outcome.job)) for outcome in outcomes],
    }
    return msgspec.json.encode(report).decode()


def json_of_run(outcome: Outcome, script: Path | None) -> dict[str, object]:
    seen = outcome.exploration
    return {
        "feature": outcome.job.feature,
        "policy": outcome.job.policy,
        "verdict": verdict_of(seen),
        "invariants": outcome.verdicts,
        "states": seen.states,
        "transitions": seen.transitions,
        "depth": seen.depth,
        "completion": {"longest": seen.steps, "bound": seen.bound},
        "seconds": round(outcome.seconds, 3),
        "reached": seen.reached,
        "mixed_round": seen.mixed_round,
        "violation": seen.violation,
        "trace": None if script is None else str(script),
    }


def verdict_of(seen: Exploration) -> str:
    if seen.violation is not None:
        return "broken"
    return "holds" if seen.complete else "undecided"


# --- for people -----------------------------------------------------------------------------------


def print_report(bounds: Bounds, outcomes: Sequence[Outcome], scripts: Scripts) -> None:
    console = Console(file=sys.stdout, highlight=False)
    console.print(bounds_text(bounds), soft_wrap=True)
    for feature in dict.fromkeys(outcome.job.feature for outcome in outcomes):
        console.print()
        console.print(table_of([one for one in outcomes if one.job.feature == feature], feature))
    console.print()
    for outcome in outcomes:
        for line in notes_on(outcome, scripts.get(outcome.job)):
            console.print(line, markup=False, soft_wrap=True)
    for policy in dict.fromkeys(outcome.job.policy for outcome in outcomes):
        text = f"{policy} promises {ranges_text(promises(PRESETS[policy]))}"
        console.print(text, soft_wrap=True)


def bounds_text(bounds: Bounds) -> str:
    return (
        f"{bounds.slots} slots, {bounds.requests} requests, prompts of 1 and {bounds.prompt_rounds}"
        f" rounds, {bounds.tokens} tokens; {bounds.cancels} cancelled, {bounds.failures} failures"
    )


def table_of(outcomes: Sequence[Outcome], feature: str) -> Table:
    """`ends in`: answers until everybody has ended, from the worst situation; and at most."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column(feature, no_wrap=True)
    for name in ("states", "transitions", "depth", "ends in", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for outcome in outcomes:
        seen = outcome.exploration
        verdict = verdict_of(seen)
        table.add_row(
            outcome.job.policy,
            f"{seen.states:,}",
            f"{seen.transitions:,}",
            f"{seen.depth}",
            f"{'?' if seen.steps is None else seen.steps} of {seen.bound}",
            f"{outcome.seconds:.1f}",
            f"[{STYLES[verdict]}]{verdict}",
        )
    return table


def ranges_text(names: Sequence[str]) -> str:
    """I1-I4 for I1, I2, I3, I4."""
    numbers = [int(name[1:]) for name in names]
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return ", ".join(f"I{low}" if low == high else f"I{low}-I{high}" for low, high in runs)


def notes_on(outcome: Outcome, script: Path | None) -> Iterator[str]:
    job, seen = outcome.job, outcome.exploration
    where = f"{job.feature}, {job.policy}"
    if outcome.verdicts["I1"] == "not promised":
        yield f"{where}: does not promise I1 (rounds of one class only); {mixed_text(seen)}"
    if seen.violation is not None:
        yield ""
        yield from violation_lines(job, seen.violation)
        yield f"written to {script}; phaseloop replay {script} opens it"
    elif not seen.complete:
        yield (
            f"{where}: undecided, --limit-states was reached"
            f" after {seen.transitions:,} transitions; no violation up to there"
        )


def mixed_text(seen: Exploration) -> str:
    if seen.mixed_round is not None:
        return f"a mixed round was found after {len(seen.mixed_round)} events"
    return "no mixed round was found" if seen.complete else "no mixed round was found yet"


def violation_lines(job: Job, found: Found) -> Iterator[str]:
    """The script, each event with what the reducer answered."""
    yield f"{job.feature}, {job.policy}: breaks {found.invariant}: {found.message}"
    yield f"the shortest script, {len(found.script)} events:"
    state = setting(job.feature, job.bounds, PRESETS[job.policy]).state
    for number, event in enumerate(found.script):
        yield f"{number:4}  {time_text(event.at_ns)}  {event_text(event)}"
        try:
            state, effects = reduce(state, event)
        except Exception as error:
            yield f"            raises {type(error).__name__}: {error}"
            return
        for effect in effects:
            yield f"            -> {effect_text(effect)}"
