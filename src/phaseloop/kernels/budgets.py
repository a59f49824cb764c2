"""What every kernel may use of a multiprocessor: cuda/budgets.toml, read and expanded."""

import itertools
import tomllib
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from .contract import SHARED_BYTES_MAX, WARP, KernelError, ceil_div
from .sources import source_directory

# Of a multiprocessor of compute capability 7.0 (CUDA C++ Programming Guide, compute capabilities).
REGISTERS = 65536
REGISTERS_STEP = 256  # a warp's registers are given in such portions
THREADS_MAX = 2048
BLOCKS_MAX = 32


class Budget(Struct, frozen=True, forbid_unknown_fields=True):
    """Upper bounds for one kernel.  `is_hot`: no spills, and no global load of 1 or 2 bytes."""

    source: str
    entry: str
    threads: int  # per block
    registers: int  # per thread
    spill_bytes: int = 0
    dynamic_shared_bytes: int = 0  # the most that launches ask for
    is_hot: bool = True


def read_budgets(directory: Path | None = None) -> list[Budget]:
    """In the file's order.  An entry is a pattern, `with` has its parameters: all combinations."""
    path = (directory or source_directory()) / "budgets.toml"
    budgets: list[Budget] = []
    for source, rows in tomllib.loads(path.read_text()).items():
        for row in rows:
            budgets += expand_row(path, source, dict(row))
    return budgets


def expand_row(path: Path, source: str, row: dict[str, Any]) -> list[Budget]:
    parameters: dict[str, list[Any]] = row.pop("with", {})
    expanded: list[Budget] = []
    for values in itertools.product(*parameters.values()):
        entry = row["entry"].format(**dict(zip(parameters, values, strict=True)))
        try:
            expanded.append(msgspec.convert({**row, "source": source, "entry": entry}, Budget))
        except msgspec.ValidationError as error:
            raise KernelError(f"{path}: {source}, {entry}: {error}") from error
    return expanded


def resident_blocks(threads: int, registers: int, shared_bytes: int) -> int:
    """How many blocks a multiprocessor holds at a time."""
    warps = ceil_div(threads, WARP)
    per_warp = ceil_div(registers * WARP, REGISTERS_STEP) * REGISTERS_STEP
    by_registers = REGISTERS // per_warp // warps
    by_shared = SHARED_BYTES_MAX // shared_bytes if shared_bytes else BLOCKS_MAX
    return min(by_registers, by_shared, THREADS_MAX // threads, BLOCKS_MAX)
