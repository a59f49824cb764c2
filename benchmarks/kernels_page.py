"""Compile every kernel for Volta and write what came out to docs/kernels.md, beside its floors.

Usage: make kernels, or python benchmarks/kernels_page.py [--check]
The instructions of the machine code are counted where CUDA's cuobjdump (12.x) is in the PATH.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kernel_shapes import Case, cases
from kernel_shapes_attention import attention_cases

from phaseloop.kernels.budgets import Budget, read_budgets, resident_blocks
from phaseloop.kernels.contract import traffic_bytes
from phaseloop.kernels.loader import cubin
from phaseloop.kernels.nvrtc import Compiled

PAGE = Path(__file__).parent.parent / "docs" / "kernels.md"
MEMORY = 900e9  # bytes per second, a V100's data sheet; a copy reaches 850 to 880
UNITS = {"HMMA": 90e12, "FP32": 15.7e12}  # operations per second; HMMA as sustained, not 125
COUNTED = ("HMMA", "LDG.128", "LDG", "LDS", "LOP3", "LDL", "STL")


def main() -> int:
    parser = argparse.ArgumentParser(prog="make kernels", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if the page is old")
    args = parser.parse_args()
    compiled = compile_all(read_budgets())
    before = PAGE.read_text()
    page = between(before, "compiled", compiled_table(compiled))
    page = between(page, "floors", floors_table())
    tool = shutil.which("cuobjdump")
    if tool is not None:
        page = between(page, "instructions", instructions_table(tool, compiled))
    if args.check:
        return int(page != before)
    PAGE.write_text(page)
    sys.stdout.write(f"written to docs/{PAGE.name}\n")
    return 0


def compile_all(budgets: list[Budget]) -> list[tuple[Budget, Compiled]]:
    """By source, in the order of the budgets."""
    entries: dict[str, list[str]] = {}
    for budget in budgets:
        entries.setdefault(budget.source, []).append(budget.entry)
    modules = {source: cubin(source, names) for source, names in entries.items()}
    return [(budget, modules[budget.source]) for budget in budgets]


def between(page: str, name: str, content: str) -> str:
    """The page with other lines between the comments that name a table."""
    begin, end = f"<!-- kernels: {name} begin -->\n", f"<!-- kernels: {name} end -->"
    head, rest = page.split(begin)
    return f"{head}{begin}{content}{end}{rest.split(end)[1]}"


def table(head: str, rows: Iterator[str]) -> str:
    columns = head.count("|") - 1
    return "\n".join([head, "|---" + "|---:" * (columns - 1) + "|", *rows]) + "\n"


def compiled_table(compiled: list[tuple[Budget, Compiled]]) -> str:
    return table(
        "| kernel | threads | registers (of) | spilled B | shared B | blocks/SM | mma "
        "| 16-byte loads / all | narrow loads |",
        (compiled_row(budget, module) for budget, module in compiled),
    )


def compiled_row(budget: Budget, module: Compiled) -> str:
    used, counts = module.resources[budget.entry], module.instructions[budget.entry]
    shared = used.shared_bytes + budget.dynamic_shared_bytes
    blocks = resident_blocks(budget.threads, used.registers, shared)
    return (
        f"| `{budget.entry}` | {budget.threads} | {used.registers} ({budget.registers}) "
        f"| {used.spill_bytes} | {shared} | {blocks} | {counts.mma} "
        f"| {counts.wide_loads} / {counts.global_loads} | {counts.narrow_loads} |"
    )


def floors_table() -> str:
    return table(
        "| model: matrix [N, K], rows, or operation | kernel | MB moved | at 900 GB/s, us | GFLOP "
        "| arithmetic, us | bound by |",
        (floors_row(case) for case in (*cases(), *attention_cases())),
    )


def floors_row(case: Case) -> str:
    moved = traffic_bytes(case.launch)
    memory_us, unit_us = moved / MEMORY * 1e6, case.operations / UNITS[case.unit] * 1e6
    bound = "memory" if memory_us > unit_us else case.unit
    return (
        f"| {case.model}: {case.name} | `{case.launch.entry}` | {moved / 1e6:.2f} "
        f"| {memory_us:.1f} | {case.operations / 1e9:.2f} | {unit_us:.1f} | {bound} |"
    )


def instructions_table(tool: str, compiled: list[tuple[Budget, Compiled]]) -> str:
    modules = {budget.source: module for budget, module in compiled}
    listings = {source: disassembled(tool, module) for source, module in modules.items()}
    return table(
        f"| kernel | all | {' | '.join(COUNTED)} |",
        (
            f"| `{budget.entry}` | "
            + " | ".join(map(str, counts(listings[budget.source][module.names[budget.entry]])))
            + " |"
            for budget, module in compiled
        ),
    )


def disassembled(tool: str, module: Compiled) -> dict[str, list[str]]:
    """By function, its instructions: "LDG.E.128.CONSTANT.SYS"."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(module.cubin)
        file.flush()
        done = subprocess.run(
            [tool, "-sass", file.name], capture_output=True, text=True, check=True
        )
    functions: dict[str, list[str]] = {}
    name = ""
    for line in done.stdout.splitlines():
        if found := re.search(r"Function : (\w+)", line):
            name = found[1]
        elif found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)", line):
            functions.setdefault(name, []).append(found[1])
    return functions


def counts(instructions: list[str]) -> list[int]:
    """Of all, then of those in COUNTED; LDG counts those that are not of 128 bits."""
    found = [len(instructions)]
    for wanted in COUNTED:
        name, _, width = wanted.partition(".")
        same = [one for one in instructions if one.split(".")[0] == name]
        if name == "LDG":
            same = [one for one in same if (".128" in one) == (width == "128")]
        found.append(len(same))
    return found


if __name__ == "__main__":
    sys.exit(main())
