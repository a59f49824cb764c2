"""Pictures of a comparison: what each request lived through, and how long clients waited.

Needs matplotlib (extra `plot`), so this module is loaded only where pictures are asked for.
"""

# pyright: reportUnknownMemberType=false
# matplotlib leaves the keywords of its methods untyped.

import io
from collections.abc import Callable, Sequence
from itertools import groupby

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from phaseloop.sim.spread import Percentiles

from .bench_policies_figures import Sample, median_of
from .bench_policies_report import Report, first_token_of, gap_of, percentile
from .bench_policies_run import Read

NS = 1e9
WAITING, TOKENS, ENDS = "#b8b8c4", "#1f77b4", "#d6604d"
DPI = 110
WIDTH_IN = 10.0
MARKS = {"p50": "o", "p95": "s", "p99": "^", "max": "D"}
NAMED_MAX = 16  # more changes of stream than that are not told apart beside the lines
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
    height = max(1.0, min(2.0, 0.14 * len(first.reads) + 0.5))
    figure = Figure(figsize=(WIDTH_IN, height * len(names) + 0.8), layout="constrained")
    axes = figure.subplots(len(names), 1, sharex=True, squeeze=False)
    for axis, name in zip(axes[:, 0], names, strict=True):
        draw_run(axis, name, report.samples(name)[0])
    axes[-1, 0].set_xlabel("seconds")
    figure.legend(handles=legend_of_runs(), loc="outside upper right", ncols=3, fontsize=8)
    return figure


def legend_of_runs() -> list[Line2D]:
    return [
        Line2D([], [], color=WAITING, linewidth=2.5, label="waits for its first token"),
        Line2D([], [], color=TOKENS, marker="|", linestyle="", label="tokens arrive"),
        Line2D([], [], color=ENDS, marker=".", linestyle="", label="answered"),
    ]


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
    name_streams(axis, sample.reads)
    axis.set_title(name, loc="left", fontsize=10)
    axis.spines[["top", "right", "left"]].set_visible(False)


def name_streams(axis: Axes, reads: Sequence[Read]) -> None:
    """Beside the middle of each run of lines that belong to one stream."""
    middles: list[float] = []
    names: list[str] = []
    row = 0
    for stream, members in groupby(reads, key=lambda read: read.ask.stream):
        count = len(list(members))
        middles.append(row + (count - 1) / 2)
        names.append(stream)
        row += count
    if len(names) > NAMED_MAX:
        middles, names = [], []
    axis.set_yticks(middles, names, fontsize=8)
    axis.tick_params(axis="y", length=0)


def waits(report: Report) -> Figure:
    columns = measures(report)
    names = report.measured
    per_row = min(2, len(columns))
    rows = -(-len(columns) // per_row)
    figure = Figure(figsize=(WIDTH_IN, rows * (0.32 * len(names) + 1.0)), layout="constrained")
    # A column is of one kind, first tokens or gaps, so its pictures can be compared.
    axes = figure.subplots(rows, per_row, squeeze=False, sharey=True, sharex="col")
    for index, (title, of) in enumerate(columns):
        draw_waits(axes[index // per_row, index % per_row], report, title, of)
    for index in range(len(columns), rows * per_row):
        axes[index // per_row, index % per_row].set_visible(False)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=4, fontsize=8)
    return figure


def measures(report: Report) -> list[tuple[str, Measure]]:
    found: list[tuple[str, Measure]] = []
    for stream in report.streams:
        found.append((f"first token of {stream}, s", first_token_of(stream)))
        found.append((f"gaps of {stream}, s", gap_of(stream)))
    return found


def draw_waits(axis: Axes, report: Report, title: str, of: Measure) -> None:
    names = report.measured
    for order, (which, mark) in enumerate(MARKS.items()):
        points = [
            (value, row)
            for row, name in enumerate(names)
            if (value := median_of(report.samples(name), percentile(of, which))) is not None
        ]
        xs, ys = [x for x, _ in points], [y for _, y in points]
        above = 10 - order  # the median on top, where they are one
        axis.plot(xs, ys, mark, label=which, markersize=5, zorder=above)
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.tick_params(axis="x", labelsize=8, labelbottom=True)
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.set_title(title, loc="left", fontsize=10)
    axis.grid(axis="both", alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
