"""A run's summary as a flat table of numbers, so that a predicate can name any of them.

`gap_s.max` becomes `gap_max_s` and `gap_max_ms`, `makespan_s` also `makespan_ms`; counts and rates
keep their names.  What there was nothing to measure of is NaN, so that no comparison with it holds.
"""

import math

import msgspec

from .metrics import Summary
from .spread import Percentiles

NOTHING = Percentiles(None, None, None, None)
RANKS = msgspec.structs.fields(Percentiles)


def figures_of(summary: Summary) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name, value in msgspec.structs.asdict(summary).items():
        if isinstance(value, str):
            continue
        if isinstance(value, Percentiles):
            for rank, number in msgspec.structs.asdict(value).items():
                figures |= in_units(f"{name.removesuffix('_s')}_{rank}_s", number)
        else:
            figures |= in_units(name, value)
    return figures


def in_units(name: str, value: float | None) -> dict[str, float]:
    number = math.nan if value is None else float(value)
    if name.endswith("_per_s") or not name.endswith("_s"):
        return {name: number}
    return {name: number, name.removesuffix("_s") + "_ms": number * 1000}
