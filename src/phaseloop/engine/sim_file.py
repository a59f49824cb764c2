"""Engines by name or from a TOML file.

The file has a `name` and two tables, `[capacity]` and `[cost]`, whose keys are the fields of those
records; what is left out keeps its default, and a cost of 0.  `phaseloop simulate --fit` writes
such files.
"""

from pathlib import Path

from msgspec.structs import asdict, fields

from .sim import Capacity, SimModel
from .sim_cost import PPM, Cost
from .sim_fields import SettingError, Table, nearest, read_toml
from .sim_presets import PRESETS

COST_MAX = 10**15  # a round of one token takes eleven days at most
RANGES: dict[str, tuple[int, int]] = {
    "slot_count": (1, 4096),
    "batch_tokens": (1, 1 << 20),
    "step_tokens": (1, 1 << 20),
    "context_length": (2, 1 << 28),
    "page_count": (1, 1 << 28),
    "page_length": (1, 1 << 16),
    "draft_tokens": (0, 32),
    "accept_ppm": (0, PPM),
    "round_ms": (0, 1_000_000),
    "jitter_ppm": (0, PPM),
}


def find_engine(name: str) -> SimModel:
    """A preset, or the file of that name.  Raises SettingError if there is neither."""
    if name in PRESETS:
        return PRESETS[name].model
    path = Path(name)
    if path.suffix == ".toml" or path.exists():
        return read_engine(path)
    known = ", ".join(PRESETS)
    hint = nearest(name, PRESETS)
    raise SettingError(f"--engine {name}: no such engine{hint} (known: {known}, or a .toml file)")


def read_engine(path: Path) -> SimModel:
    root = read_toml(path)
    name = root.text("name")
    capacity = read_capacity(root.table("capacity")) if "capacity" in root else Capacity()
    cost = read_cost(root.table("cost"))
    root.done()
    if not cost.prefill_token_ns + cost.prefill_round_ns or not (
        cost.decode_row_ns + cost.decode_round_ns
    ):
        raise SettingError(f"{path}: cost: prompts and tokens must take time, or none ever passes")
    return SimModel(name, capacity, cost)


def read_capacity(table: Table) -> Capacity:
    values: dict[str, int | bool] = {}
    for name, default in asdict(Capacity()).items():
        if isinstance(default, bool):
            values[name] = table.boolean(name, default)
        else:
            values[name] = table.integer(name, *RANGES[name], default)
    table.done()
    return Capacity(**values)  # pyright: ignore[reportArgumentType]


def read_cost(table: Table) -> Cost:
    costs = {
        field.name: table.integer(field.name, *RANGES.get(field.name, (0, COST_MAX)), 0)
        for field in fields(Cost)
    }
    table.done()
    return Cost(**costs)


def engine_toml(model: SimModel, comments: tuple[str, ...] = ()) -> str:
    """The file that `read_engine` reads back to the same model."""
    lines = [*(f"# {comment}" for comment in comments), f"name = {quoted(model.name)}", ""]
    for title, record in (("capacity", model.capacity), ("cost", model.cost)):
        lines.append(f"[{title}]")
        for name, value in asdict(record).items():
            lines.append(f"{name} = {str(value).lower()}")
        lines.append("")
    return "\n".join(lines)


def quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{"".join(c if c.isprintable() else "?" for c in escaped)}"'
