"""What `phaseloop simulate` prints: a table for people, objects for programs, the engines."""

import shutil
import sys
from collections.abc import Callable
from typing import Literal

import msgspec
from msgspec import Struct
from msgspec.structs import asdict
from rich.console import Console
from rich.table import Table
from rich.text import Text

from phaseloop.engine.sim_presets import PRESETS
from phaseloop.sim.calibration import FIGURES, Figure
from phaseloop.sim.metrics import Summary
from phaseloop.sim.spread import Percentiles
from phaseloop.sim.workload import Workload
from phaseloop.sim.world import Scene

MS = 1_000_000


class Row(Struct, frozen=True):
    """One line of the table.  `best` says which end of the row is the good one, if either is."""

    label: str
    value: Callable[[Summary], float | None]
    shown: Callable[[float], str]
    best: Literal["low", "high"] | None = None


def span(seconds: float) -> str:
    if seconds < 0.01:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 1000:
        return f"{seconds:.2f} s"
    return f"{seconds / 3600:.2f} h" if seconds >= 36_000 else f"{seconds / 60:.1f} min"


def rate(per_second: float) -> str:
    return f"{per_second:,.0f}/s" if per_second >= 100 else f"{per_second:.1f}/s"


def count(value: float) -> str:
    return f"{value:,.0f}"


def share(value: float) -> str:
    return f"{value * 100:.0f} %"


def waits(label: str, of: Callable[[Summary], Percentiles], *names: str) -> tuple[Row, ...]:
    percentiles: dict[str, Callable[[Summary], float | None]] = {
        "p50": lambda s: of(s).p50,
        "p95": lambda s: of(s).p95,
        "p99": lambda s: of(s).p99,
        "max": lambda s: of(s).max,
    }
    return tuple(Row(f"{label} {name}", percentiles[name], span, "low") for name in names)


SECTIONS: tuple[tuple[Row, ...], ...] = (
    (
        Row("all prompts done", lambda s: s.prefill_makespan_s, span, "low"),
        Row("all done", lambda s: s.makespan_s, span, "low"),
        Row("prompt tokens", lambda s: s.prefill_tokens_per_s, rate, "high"),
        Row("decode tokens", lambda s: s.decode_tokens_per_s, rate, "high"),
        Row("tokens overall", lambda s: s.tokens_per_s, rate, "high"),
        Row("decode occupancy", lambda s: s.decode_occupancy, share),
    ),
    waits("first token", lambda s: s.ttft_s, "p50", "p95", "p99", "max"),
    waits("gap", lambda s: s.gap_s, "p50", "p95", "p99", "max"),
    (
        *waits("queue wait", lambda s: s.queue_wait_s, "p50", "p95", "max"),
        *waits("prefill wait", lambda s: s.prefill_wait_s, "p50", "p95", "max"),
        *waits("barrier wait", lambda s: s.barrier_wait_s, "p50", "p95", "max"),
    ),
    (
        Row("rounds", lambda s: s.rounds, count),
        Row("mixed rounds", lambda s: s.mixed_rounds, count),
        Row("phase changes", lambda s: s.phase_changes, count),
        Row("events", lambda s: s.events, count),
    ),
    (
        Row("requests", lambda s: s.requests, count),
        Row("finished", lambda s: s.finished, count),
        Row("cancelled", lambda s: s.cancelled, count),
        Row("expired", lambda s: s.expired, count),
        Row("refused", lambda s: s.refused, count),
        Row("failed", lambda s: s.failed, count),
        Row("unfinished", lambda s: s.unfinished, count),
    ),
)
ALWAYS_SHOWN = ("requests", "finished", "mixed rounds")


def print_table(summaries: list[Summary], scene: Scene, workload: Workload) -> None:
    sections = [shown for rows in SECTIONS if (shown := [r for r in rows if says(r, summaries)])]
    if not sys.stdout.isatty():
        lines = [caption(scene, workload), *plain_lines(sections, summaries)]
        sys.stdout.write("\n".join(lines) + "\n")
        return
    table = Table()
    table.add_column("")
    for summary in summaries:
        table.add_column(header(summary.policy), justify="right")
    for rows in sections:
        for row in rows:
            table.add_row(row.label, *styled(row, summaries), end_section=row is rows[-1])
    console = Console(width=max(80, shutil.get_terminal_size().columns))
    console.print(caption(scene, workload), highlight=False)
    console.print(table)


def says(row: Row, summaries: list[Summary]) -> bool:
    """Ends that did not happen, and waits that nobody had, take no line."""
    return row.label in ALWAYS_SHOWN or any(row.value(summary) for summary in summaries)


def header(policy: str) -> str:
    """In two lines where it is long, so that six policies fit side by side."""
    head, dash, tail = policy.rpartition("-")
    return f"{head}{dash}\n{tail}" if head else policy


def cells(row: Row, summaries: list[Summary]) -> list[str]:
    values = [row.value(summary) for summary in summaries]
    return ["-" if value is None else row.shown(value) for value in values]


def styled(row: Row, summaries: list[Summary]) -> list[Text]:
    """The best value of a row in bold, unless all are the same."""
    texts = cells(row, summaries)
    values = {
        text: value
        for s, text in zip(summaries, texts, strict=True)
        if (value := row.value(s)) is not None
    }
    best = None
    if row.best is not None and len(values) > 1:
        best = (min if row.best == "low" else max)(values, key=lambda text: values[text])
    return [Text(text, style="bold green" if text == best else "") for text in texts]


def plain_lines(sections: list[list[Row]], summaries: list[Summary]) -> list[str]:
    heads = [header(summary.policy).split("\n") for summary in summaries]
    body = [(row.label, cells(row, summaries)) for rows in sections for row in rows]
    width = max(len(label) for label, _ in body)
    widths = [
        max(*map(len, heads[column]), *(len(values[column]) for _, values in body))
        for column in range(len(summaries))
    ]

    def line(label: str, values: list[str]) -> str:
        padded = (value.rjust(wide) for value, wide in zip(values, widths, strict=True))
        return "  ".join((label.ljust(width), *padded)).rstrip()

    tall = max(map(len, heads))
    lines = [
        line("", [([""] * (tall - len(head)) + head)[level] for head in heads])
        for level in range(tall)
    ]
    for rows in sections:
        lines += ["", *(line(row.label, cells(row, summaries)) for row in rows)]
    return lines


def caption(scene: Scene, workload: Workload) -> str:
    limits = scene.limits
    bound = f"{limits.round_ns_max // MS} ms" if limits.round_ns_max else "tokens alone"
    parts = [
        f"{workload.name} on {scene.model.name}",
        f"{limits.slot_count} slot{'s' * (limits.slot_count > 1)}",
        f"rounds of {limits.batch_tokens} tokens, bounded by {bound}",
        f"seed {scene.seed}",
    ]
    if limits.draft_tokens:
        parts.insert(3, f"{limits.draft_tokens} drafts")
    if scene.cut_ns is not None:
        parts.append(f"cut at {span(scene.cut_ns / 1e9)}: open waits count so far")
    return "; ".join(parts)


def json_of(summaries: list[Summary], scene: Scene, workload: Workload) -> str:
    about = {"engine": scene.model.name, "seed": scene.seed, "workload": workload.name}
    objects = [{**asdict(summary), **about} for summary in summaries]
    return msgspec.json.format(msgspec.json.encode(objects), indent=2).decode()


# --- engines --------------------------------------------------------------------------------------


def engine_lines() -> list[str]:
    """Every preset: its parameters with their sources, then what it says to the figures."""
    lines: list[str] = []
    for name, preset in PRESETS.items():
        capacity = preset.model.capacity
        lines += [
            f"{name}: {preset.about}",
            f"  {capacity.slot_count} slots, rounds of {capacity.batch_tokens} tokens, context "
            f"{capacity.context_length:,}, {capacity.page_count:,} pages of {capacity.page_length}",
            "",
        ]
        values = {**asdict(preset.model.cost), "accept_ppm": capacity.accept_ppm}
        lines += [
            f"  {parameter:<18} {values[parameter]:>12,}  {source}"
            for parameter, source in preset.sources.items()
        ]
        lines += ["", f"  {'figures':<9} {'measured':>10} {'simulated':>10} {'off':>7}"]
        lines += [figure_line(figure) for figure in FIGURES[name]]
        lines.append("")
    return lines[:-1]


def figure_line(figure: Figure) -> str:
    simulated = figure.simulated()
    off = f"{simulated / figure.measured - 1:+.1%}"
    unit = f" {figure.unit}" if figure.unit else ""
    numbers = f"{figure.measured:>10.6g} {simulated:>10.6g} {off:>7}"
    return f"  {figure.section:<9} {numbers}  {figure.use}: {figure.what}{unit and ',' + unit}"
