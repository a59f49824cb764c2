"""Pictures of a comparison: what each request lived through, and how long clients waited.

Needs matplotlib (extra `plot`), so this module is loaded only where pictures are asked for.
"""

# pyright: reportUnknownMemberType=false
# matplotlib leaves the keywords of its methods untyped.

import io
from collections.abc import Callable

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from phaseloop.sim.spread import Percentiles

from .bench_policies_figures import Sample, median_of
from .bench_policies_report import Report, first_token_of, gap_of, percentile

NS = 1e9
WAITING, TOKENS, ENDS = "#b8b8c4", "#1f77b4", "#d6604d"
DPI = 110
WIDTH_IN = 10.0
MARKS = {"p50": "o", "p95": "s", "p99": "^", "max": "D"}
Measure = Callable[[Sample], Percentiles]


def pictures(report: Report) -> dict[str, tuple[str, bytes]]:
    """By name: what it shows, and a PNG.  Nothing where nothing was measured."""
    if not report.measured:
        return {}
    return {
        "runs": (
            "One run of each: a line per request, grey while it waits for its first token, "
            "a mark for each arrival of tokens",
            drawn(runs(report)),
        ),
        "waits": ("Waits of the clients by percentile", drawn(waits(report))),
    }


def drawn(figure: Figure) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=DPI, metadata={"Software": None})
    return out.getvalue()


def runs(report: Report) -> Figure:
    names = report.measured
    first = report.samples(names[0])[0]
    height = max(1.0, min(2.5, 0.14 * len(first.reads) + 0.5))
    figure = Figure(figsize=(WIDTH_IN, height * len(names) + 0.6), layout="constrained")
    axes = figure.subplots(len(names), 1, sharex=True, squeeze=False)
    for axis, name in zip(axes[:, 0], names, strict=True):
        draw_run(axis, name, report.samples(name)[0])
    axes[-1, 0].set_xlabel("seconds")
    return figure


def draw_run(axis: Axes, name: str, sample: Sample) -> None:
    for row, read in enumerate(sample.reads):
        arrived = read.ask.at_ns / NS
        times = [at_ns / NS for at_ns in read.times_ns]
        end = times[0] if times else (read.end_ns or round(sample.makespan_s * NS)) / NS
        axis.hlines(row, arrived, end, color=WAITING, linewidth=2.5)
        axis.plot(times, [row] * len(times), "|", color=TOKENS, markersize=4, markeredgewidth=0.7)
        if times and read.end == "answered":
            axis.plot(times[-1], row, ".", color=ENDS, markersize=4)
    axis.set_ylim(len(sample.reads) - 0.4, -0.6)
    axis.set_yticks([])
    axis.set_title(name, loc="left", fontsize=10)
    axis.spines[["top", "right", "left"]].set_visible(False)


def waits(report: Report) -> Figure:
    columns = measures(report)
    names = report.measured
    per_row = min(2, len(columns))
    rows = -(-len(columns) // per_row)
    figure = Figure(figsize=(WIDTH_IN, rows * (0.32 * len(names) + 1.0)), layout="constrained")
    axes = figure.subplots(rows, per_row, squeeze=False, sharey=True)
    for index, (title, of) in enumerate(columns):
        draw_waits(axes[index // per_row, index % per_row], report, title, of)
    for index in range(len(columns), rows * per_row):
        axes[index // per_row, index % per_row].set_visible(False)
    axes[0, 0].legend(fontsize=8, loc="best")
    return figure


def measures(report: Report) -> list[tuple[str, Measure]]:
    found: list[tuple[str, Measure]] = []
    for stream in report.streams:
        found.append((f"first token of {stream}, s", first_token_of(stream)))
        found.append((f"gaps of {stream}, s", gap_of(stream)))
    return found


def draw_waits(axis: Axes, report: Report, title: str, of: Measure) -> None:
    names = report.measured
    for which, mark in MARKS.items():
        points = [
            (value, row)
            for row, name in enumerate(names)
            if (value := median_of(report.samples(name), percentile(of, which))) is not None
        ]
        axis.plot([x for x, _ in points], [y for _, y in points], mark, label=which, markersize=5)
    axis.set_xscale("log")
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.set_title(title, loc="left", fontsize=10)
    axis.grid(axis="x", alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
