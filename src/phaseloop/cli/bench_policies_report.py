"""What was measured of policies and servers: tables, JSON, and a page with pictures."""

import base64
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import msgspec
from msgspec import Struct

from phaseloop.sim.spread import Percentiles

from .bench_policies_figures import Figure, Sample, Taken, median_of, range_of, same_answers
from .bench_tables import Cells, machine, markdown_table

STYLE = """
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .75rem; text-align: right; border-bottom: 1px solid #8886 }
th:first-child, td:first-child { text-align: left }
img { max-width: 100%; background: #fff } code { overflow-wrap: anywhere }
"""


class Report(Struct, frozen=True):
    command: str
    workload: str
    requests: int
    seed: int
    targets: tuple[str, ...]
    own: tuple[str, ...]  # those of them that are policies of one phaseloop server
    taken: tuple[Taken, ...]
    others_cores: float  # used meanwhile by processes that were not started here
    is_interrupted: bool = False

    def samples(self, target: str) -> list[Sample]:
        return [one.sample for one in self.taken if one.target == target and one.sample is not None]

    @property
    def rejected(self) -> list[Taken]:
        return [one for one in self.taken if one.rejected is not None]

    @property
    def measured(self) -> list[str]:
        """Targets with at least one valid run."""
        return [name for name in self.targets if self.samples(name)]

    @property
    def streams(self) -> list[str]:
        first = next((self.samples(name)[0] for name in self.measured), None)
        return [] if first is None else list(first.groups)

    @property
    def reference(self) -> Sample | None:
        """Whose answers others are compared with: the first valid run of the first policy."""
        return next((self.samples(name)[0] for name in self.measured), None)


# --- tables ---------------------------------------------------------------------------------------


def rate_cells(report: Report) -> Cells:
    head = ["", "runs", "makespan s", "prefill tok/s", "decode tok/s", "all tok/s"]
    cells = [[*head, "slots used", "same answers"]]
    for name in report.targets:
        samples = report.samples(name)
        runs = [one for one in report.taken if one.target == name]
        cells.append(
            [
                name,
                f"{len(samples)} of {len(runs)}",
                with_range(samples, lambda one: one.makespan_s, 1),
                with_range(samples, lambda one: one.prefill_tokens_per_s, 0),
                with_range(samples, lambda one: one.decode_tokens_per_s, 1),
                with_range(samples, lambda one: one.tokens_per_s, 1),
                percent(median_of(samples, lambda one: one.occupancy)),
                agreement(report.reference, samples),
            ]
        )
    return cells


def wait_cells(report: Report, of: Callable[[Sample], Percentiles]) -> Cells:
    cells = [["", "p50", "p95", "p99", "max"]]
    for name in report.targets:
        samples = report.samples(name)
        figures = [percentile(of, which) for which in ("p50", "p95", "p99", "max")]
        cells.append([name, *(milli(median_of(samples, figure)) for figure in figures)])
    return cells


def percentile(of: Callable[[Sample], Percentiles], which: str) -> Figure:
    return lambda sample: getattr(of(sample), which)


def first_token_of(stream: str) -> Callable[[Sample], Percentiles]:
    return lambda sample: sample.groups[stream].ttft_s


def gap_of(stream: str) -> Callable[[Sample], Percentiles]:
    return lambda sample: sample.groups[stream].gap_s


def sections(report: Report) -> list[tuple[str, Cells]]:
    found = [("Throughput", rate_cells(report))]
    streams = report.streams
    if len(streams) > 1:
        for stream in streams:
            found.append(
                (f"First token of {stream}, ms", wait_cells(report, first_token_of(stream)))
            )
            found.append((f"Gaps of {stream}, ms", wait_cells(report, gap_of(stream))))
    else:
        found.append(("First token, ms", wait_cells(report, lambda one: one.ttft_s)))
        found.append(("Gaps between tokens, ms", wait_cells(report, lambda one: one.gap_s)))
    found.append(("Wait for a slot, ms", wait_cells(report, lambda one: one.queue_wait_s)))
    found.append(("Wait at the barrier, ms", wait_cells(report, lambda one: one.barrier_wait_s)))
    return [(title, cells) for title, cells in found if has_figures(cells)]


def has_figures(cells: Cells) -> bool:
    return any(cell not in ("-", "") for line in cells[1:] for cell in line[1:])


def with_range(samples: Sequence[Sample], figure: Figure, digits: int) -> str:
    """The median, and the smallest and largest where there are several."""
    median, ends = median_of(samples, figure), range_of(samples, figure)
    if median is None or ends is None:
        return "-"
    shown = f"{median:,.{digits}f}"
    low, high = ends
    return shown if len(samples) == 1 else f"{shown} ({low:,.{digits}f}-{high:,.{digits}f})"


def agreement(reference: Sample | None, samples: Sequence[Sample]) -> str:
    """Of all the target's runs together; n/n is every answer in every run."""
    if reference is None or not samples:
        return "-"
    counts = [same_answers(reference, sample) for sample in samples]
    same, both = (sum(column) for column in zip(*counts, strict=True))
    return f"{same}/{both}"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def milli(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:,.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.1f}"


def notes(report: Report) -> list[str]:
    found = [
        f"{report.workload}: {report.requests} requests, seed {report.seed}; medians over the runs "
        "of each run's figure, and the range in brackets; runs in an order drawn anew each repeat"
    ]
    late = max((one.sample.late_s for one in report.taken if one.sample), default=0.0)
    found.append(f"a request was sent {late * 1e3:.0f} ms too late at most")
    if report.others_cores > 0.05:
        found.append(
            f"processes that were not started here used {report.others_cores:.1f} cores meanwhile"
        )
    if report.is_interrupted:
        found.append("interrupted: what was measured until then is shown")
    return found + [
        f"rejected: {one.target}, repeat {one.repeat}: {one.rejected}" for one in report.rejected
    ]


# --- files ----------------------------------------------------------------------------------------


def as_json(report: Report) -> bytes:
    tables: dict[str, Any] = dict(sections(report))
    fields = {"machine": machine(), "tables": tables, "measured": report}
    return msgspec.json.format(msgspec.json.encode(fields)) + b"\n"


def as_markdown(report: Report) -> str:
    lines = [f"    {report.command}", ""]
    for title, cells in sections(report):
        lines += [f"{title}:", "", *markdown_table(cells), ""]
    return "\n".join([*lines, *(f"- {note}" for note in notes(report)), ""])


def as_html(report: Report, pictures: Sequence[tuple[str, bytes]]) -> bytes:
    """One file that needs nothing beside it.  `pictures`: what each shows, and its PNG."""
    body = [f"<h1>Policies on {escape(report.workload)}</h1>"]
    body.append(f"<p><code>{escape(report.command)}</code></p>")
    body.append(f"<p>{escape(', '.join(machine().values()))}</p>")
    for text, png in pictures:
        data = base64.b64encode(png).decode()
        body.append(f'<p><img alt="{escape(text)}" src="data:image/png;base64,{data}"></p>')
    for title, cells in sections(report):
        body.append(f"<h2>{escape(title)}</h2>{html_table(cells)}")
    body.append("<ul>" + "".join(f"<li>{escape(note)}" for note in notes(report)) + "</ul>")
    head = f'<meta charset="utf-8"><title>Policies</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en">{head}{"".join(body)}\n'.encode()


def html_table(cells: Cells) -> str:
    head, *lines = cells
    rows = ["".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)]
    rows += ["".join(f"<td>{escape(cell)}</td>" for cell in line) for line in lines]
    return "<table>" + "".join(f"<tr>{row}</tr>" for row in rows) + "</table>"
