"""What was measured, as a table, as JSON, as CSV, and as a section of a page."""

import csv
import io
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from rich.table import Table

from .bench_engine_limits import Limits
from .bench_engine_rows import Clock, Row
from .bench_tables import machine, markdown_table, table_of
from .errors import UserError

BEGIN, END = "<!-- engine: begin -->", "<!-- engine: end -->"
OWN = ("engine", "engine fast")


class Taken(Struct, frozen=True):
    """One sample, or why there is none."""

    repeat: int
    row: Row
    runner: str
    tokens: int = 0
    seconds: float = 0.0
    rejected: str | None = None

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Report(Struct, frozen=True):
    command: str
    model: str
    model_bytes: int
    backend: str
    threads: int
    clock: Clock
    repeats: int
    programs: dict[str, str]  # runner -> its command and build
    rows: tuple[Row, ...]
    runners: tuple[str, ...]
    taken: tuple[Taken, ...]
    limits: Limits
    others_cores: float  # that other processes used meanwhile

    def rates(self, row: Row, runner: str) -> list[float]:
        return [
            one.rate
            for one in self.taken
            if one.row == row and one.runner == runner and one.rejected is None
        ]

    def rate(self, row: Row, runner: str) -> float | None:
        rates = self.rates(row, runner)
        return statistics.median(rates) if rates else None

    def ratio(self, row: Row, runner: str, other: str) -> float | None:
        """The median over repeats: within one the machine was the same for both, or nearly so."""
        rates = {
            (one.repeat, one.runner): one.rate
            for one in self.taken
            if one.row == row and one.rejected is None
        }
        ratios = [
            rate / rates[repeat, other]
            for (repeat, name), rate in rates.items()
            if name == runner and (repeat, other) in rates
        ]
        return statistics.median(ratios) if ratios else None

    @property
    def rejected(self) -> list[Taken]:
        return [one for one in self.taken if one.rejected is not None]

    @property
    def programs_present(self) -> tuple[str, ...]:
        return tuple(name for name in self.runners if name in self.programs)


# --- tables ---------------------------------------------------------------------------------------


def rate_cells(report: Report) -> list[list[str]]:
    """Tokens per second: a header, and a line per row."""
    cells = [["tokens/s", *report.runners, "limit"]]
    for row in report.rows:
        rates = (with_spread(report.rates(row, runner)) for runner in report.runners)
        cells.append([row.name, *rates, f"{report.limits.rate(row):,.0f}"])
    return cells


def ratio_cells(report: Report) -> list[list[str]]:
    """How often as fast the engine is: a header, and a line per row."""
    others = report.programs_present
    cells = [["times as fast", *(f"{own} ÷ {name}" for name in (*others, "limit") for own in OWN)]]
    for row in report.rows:
        ratios = [report.ratio(row, own, name) for name in others for own in OWN]
        for own in OWN:
            rate = report.rate(row, own)
            ratios.append(None if rate is None else rate / report.limits.rate(row))
        cells.append([row.name, *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios)])
    return cells


def with_spread(rates: Sequence[float]) -> str:
    """The median, and half the distance of the quartiles as a share of it."""
    if not rates:
        return ""
    median = statistics.median(rates)
    digits = 0 if median >= 100 else 1
    if len(rates) < 3:
        return f"{median:,.{digits}f}"
    low, _, high = statistics.quantiles(rates, n=4, method="inclusive")
    return f"{median:,.{digits}f} ±{(high - low) / 2 / median:.1%}"


def tables(report: Report) -> list[Table]:
    return [table_of(cells) for cells in (rate_cells(report), ratio_cells(report))]


def notes(report: Report) -> list[str]:
    peaks = ", ".join(
        f"{kind} {rate / 1e9:.1f}" for kind, rate in report.limits.multiply_adds_per_second.items()
    )
    limits = report.limits
    clock = "elapsed time" if report.clock == "wall" else "CPU time of the process"
    found = [
        f"{report.model}, {report.model_bytes / 1e6:.1f} MB; threads: {report.threads}; "
        f"{report.backend}; by {clock}, medians of {report.repeats} interleaved repeats, ± half "
        "the distance of the quartiles",
        f"limit: {limits.decode_bytes / 1e6:.1f} MB per decode round at "
        f"{limits.bytes_per_second / 1e9:.1f} GB/s; {limits.prefill_multiply_adds / 1e6:.1f} M "
        f"multiply-adds per prompt token, {limits.decode_multiply_adds / 1e6:.1f} M per generated "
        f"one, at 10⁹/s: {peaks}",
    ]
    found += [f"{name}: {shown}" for name, shown in report.programs.items()]
    if report.others_cores > 0.05:
        found.append(f"other processes used {report.others_cores:.1f} cores meanwhile")
    if report.rejected:
        reasons = {f"{one.runner}, {one.row.name}: {one.rejected}" for one in report.rejected}
        found.append(f"{len(report.rejected)} samples rejected: {'; '.join(sorted(reasons))}")
    return found


# --- files ----------------------------------------------------------------------------------------


def as_json(report: Report) -> bytes:
    results: list[dict[str, Any]] = [
        {
            "row": row,
            "limit": report.limits.rate(row),
            "rates": {name: report.rate(row, name) for name in report.runners},
            "ratios": {
                f"{own} / {name}": report.ratio(row, own, name)
                for name in report.programs_present
                for own in OWN
            },
        }
        for row in report.rows
    ]
    fields = {"machine": machine(), "results": results, "measured": report}
    return msgspec.json.format(msgspec.json.encode(fields)) + b"\n"


def as_csv(report: Report) -> str:
    text = io.StringIO()
    out = csv.writer(text)
    out.writerow(["repeat", "kind", "size", "runner", "tokens", "seconds", "rejected"])
    for one in report.taken:
        row = one.row
        measured = ("", "") if one.rejected else (one.tokens, f"{one.seconds:.6f}")
        out.writerow([one.repeat, row.kind, row.size, one.runner, *measured, one.rejected or ""])
    return text.getvalue()


def as_markdown(report: Report) -> str:
    described = ", ".join(str(value) for value in machine().values())
    return "\n".join(
        [
            f"Measured on {described}, by",
            "",
            f"    {report.command}",
            "",
            *markdown_table(rate_cells(report)),
            "",
            *markdown_table(ratio_cells(report)),
            "",
            *(f"- {note}" for note in notes(report)),
        ]
    )


def check_page(path: Path) -> None:
    """Raises UserError where there is no section to rewrite; before anything is measured."""
    page = read_page(path)
    if not 0 <= page.find(BEGIN) < page.find(END):
        raise UserError(f"--markdown {path}: no section to rewrite; put {BEGIN} and {END} in it")


def page_with(path: Path, report: Report) -> str:
    """The page with its section written anew."""
    before, _, rest = read_page(path).partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{as_markdown(report)}\n\n{END}{after}"


def read_page(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UserError(f"--markdown {path}: {reason}") from None
