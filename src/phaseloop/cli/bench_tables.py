"""Tables of measurements, for a terminal and for a page; and the machine they were measured on."""

import os
import platform
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from .errors import UserError

Cells = Sequence[Sequence[str]]  # a header, and a line per row


def table_of(cells: Cells, title: str | None = None) -> Table:
    found = Table(title=title, title_justify="left")
    for index, name in enumerate(cells[0]):
        found.add_column(name, justify="right" if index else "left")
    for line in cells[1:]:
        found.add_row(*line)
    return found


def markdown_table(cells: Cells) -> list[str]:
    ruler = ["---", *["---:"] * (len(cells[0]) - 1)]
    return [f"| {' | '.join(line)} |" for line in (cells[0], ruler, *cells[1:])]


def machine() -> dict[str, str]:
    return {
        "cpu": cpu_model(),
        "cores": f"{os.cpu_count()} cores",
        "system": f"{platform.system()} {platform.machine()}",
    }


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "an unknown CPU"
    models = [one.split(":", 1)[1].strip() for one in lines if one.startswith("model name")]
    return models[0] if models else "an unknown CPU"


def save(path: Path, content: bytes) -> None:
    """Raises UserError, and names the path."""
    try:
        path.write_bytes(content)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from None
