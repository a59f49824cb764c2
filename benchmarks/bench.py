"""Measure what design budgets, print it, and write it to docs/performance.md.

Usage: make bench, or python benchmarks/bench.py [--only WORD] [--json FILE] [--list]
"""

import argparse
import importlib
import sys
from pathlib import Path

from harness import FIGURES, Figure, Measured, as_json, budget, busy, markdown, spelled, take

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "performance.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--only", metavar="WORD", help="figures whose name contains the word")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the results there as well")
    parser.add_argument("--list", action="store_true", help="name the figures, measure nothing")
    args = parser.parse_args()
    figures = [one for one in load() if args.only is None or args.only in one.name]
    if not figures:
        sys.stderr.write(f"no figure has {args.only!r} in its name; --list names them\n")
        return 2
    if args.list:
        say("\n".join(one.name for one in figures))
        return 0
    warning = busy()  # before there is a load of our own
    if warning:
        sys.stderr.write(f"{warning}  What follows is too slow.\n")
    results = [report(take(one)) for one in figures]
    say("\n" + as_json(results))
    if args.json is not None:
        args.json.write_text(as_json(results) + "\n")
    if args.only is None:
        write_page(results, warning)
        say(f"\nwritten to {PAGE.relative_to(HERE.parent)}")
    return 0


def load() -> list[Figure]:
    """All figures, by file and in the order of the file."""
    for path in sorted(HERE.glob("bench_*.py")):
        importlib.import_module(path.stem)
    return FIGURES


def report(one: Measured) -> Measured:
    p99 = "" if one.p99 is None else f"p99 {spelled(one.p99, one.unit)}"
    kept = {True: "", False: "  OVER BUDGET", None: ""}[one.kept]
    median = spelled(one.median, one.unit)
    say(f"{one.name:<60} {median:>14}  {p99:<20} {budget(one)}{kept}")
    return one


def write_page(results: list[Measured], warning: str) -> None:
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{markdown(results, warning)}\n\n{END}{after}")


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
