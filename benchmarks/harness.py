"""What a figure is, how it is measured, and how a set of them is reported.

A figure is one function: it does the work and returns samples, all in the figure's unit.  To add
one, decorate a function with `@figure(...)` in a bench_*.py of this folder; bench.py finds it.

    @figure("queue: insert", unit="µs", at_most=2.0)
    def queue_insert() -> Samples:
        return per_call(lambda: insert(entries, key))

Budgets are for the median, or for the 99th percentile where `p99_at_most` says so.  They are
printed beside what was measured and never fail a run: a slow machine is not a fault.
"""

import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from msgspec import Struct

Samples: TypeAlias = Sequence[float]


class Figure(Struct, frozen=True):
    name: str
    unit: str
    measure: Callable[[], Samples]
    at_most: float | None = None
    at_least: float | None = None
    p99_at_most: float | None = None


class Measured(Struct, frozen=True):
    name: str
    unit: str
    median: float
    p99: float | None  # None where there are too few samples to say
    samples: int
    at_most: float | None
    at_least: float | None
    p99_at_most: float | None

    @property
    def kept(self) -> bool | None:
        """Whether the budget is kept; None where there is none."""
        verdicts = [
            self.median <= self.at_most if self.at_most is not None else None,
            self.median >= self.at_least if self.at_least is not None else None,
            self.p99 <= self.p99_at_most
            if self.p99_at_most is not None and self.p99 is not None
            else None,
        ]
        known = [verdict for verdict in verdicts if verdict is not None]
        return all(known) if known else None


FIGURES: list[Figure] = []


def figure(
    name: str,
    *,
    unit: str,
    at_most: float | None = None,
    at_least: float | None = None,
    p99_at_most: float | None = None,
) -> Callable[[Callable[[], Samples]], Callable[[], Samples]]:
    """Register the function as the figure of that name; see the module's docstring."""

    def register(measure: Callable[[], Samples]) -> Callable[[], Samples]:
        FIGURES.append(Figure(name, unit, measure, at_most, at_least, p99_at_most))
        return measure

    return register


def per_call(call: Callable[[], object], *, calls: int = 3000, warm_up: int = 100) -> Samples:
    """Microseconds of each of many calls."""
    for _ in range(warm_up):
        call()
    samples: list[float] = []
    for _ in range(calls):
        start_ns = time.perf_counter_ns()
        call()
        samples.append((time.perf_counter_ns() - start_ns) / 1e3)
    return samples


def take(one: Figure) -> Measured:
    gc.collect()
    samples = sorted(one.measure())
    p99 = samples[len(samples) * 99 // 100] if len(samples) >= 100 else None
    return Measured(
        one.name,
        one.unit,
        statistics.median(samples),
        p99,
        len(samples),
        one.at_most,
        one.at_least,
        one.p99_at_most,
    )


# --- reports --------------------------------------------------------------------------------------


def machine() -> dict[str, str | int]:
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count() or 0,
        "system": f"{platform.system()} {platform.machine()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
    }


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else "unknown"


def busy() -> str:
    """A warning where others use the machine too; empty where it is ours."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    return f"The machine was busy (load {load:.1f} on {cores} cores)." if load > cores / 2 else ""


def markdown(results: Sequence[Measured], warning: str) -> str:
    """The machine and a table, as docs/performance.md has them."""
    described = machine()
    head = (
        f"Measured on {described['cpu']}, {described['cores']} cores, {described['system']}, "
        f"{described['python']}."
    )
    rows = ["| figure | median | p99 | budget | kept |", "|---|---:|---:|---|---|"]
    for one in results:
        p99 = "" if one.p99 is None else spelled(one.p99, one.unit)
        kept = {True: "yes", False: "**no**", None: ""}[one.kept]
        median = spelled(one.median, one.unit)
        rows.append(f"| {one.name} | {median} | {p99} | {budget(one)} | {kept} |")
    return "\n".join([f"{head} {warning}".rstrip(), "", *rows])


def budget(one: Measured) -> str:
    parts: list[str] = []
    if one.at_most is not None:
        parts.append(f"≤ {spelled(one.at_most, one.unit)}")
    if one.at_least is not None:
        parts.append(f"≥ {spelled(one.at_least, one.unit)}")
    if one.p99_at_most is not None:
        parts.append(f"p99 ≤ {spelled(one.p99_at_most, one.unit)}")
    return ", ".join(parts)


def spelled(value: float, unit: str) -> str:
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f} {unit}"


def as_json(results: Sequence[Measured]) -> str:
    figures = [
        {
            "name": one.name,
            "unit": one.unit,
            "median": one.median,
            "p99": one.p99,
            "samples": one.samples,
            "budget": budget(one),
            "kept": one.kept,
        }
        for one in results
    ]
    return json.dumps({"machine": machine(), "figures": figures}, indent=2, ensure_ascii=False)
