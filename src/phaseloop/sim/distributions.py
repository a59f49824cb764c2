"""Distributions of lengths and times in a workload: how they are written, and how one is drawn.

    prompt = 512                                                     always this
    prompt = { kind = "uniform", low = 100, high = 2000 }            every integer as likely
    prompt = { kind = "lognormal", median = 800, sigma = 1.0, low = 16, high = 8000 }
    prompt = { kind = "choice", values = [200, 8000], weights = [9, 1] }
    prompt = { kind = "empirical", values = [812, 97, 1533, 640] }   each as likely
    prompt = { kind = "list", values = [8192, 32768] }               in order, and from the start

Of a lognormal that leaves [low, high], the nearer end is taken.  Times are written in seconds and
drawn in nanoseconds.
"""

import math
from bisect import bisect_right
from itertools import accumulate
from statistics import NormalDist
from typing import TypeAlias

from msgspec import Struct

from phaseloop.engine.sim_fields import Table

KINDS = ("uniform", "lognormal", "choice", "empirical", "list")
SIGMA_MAX = 10.0
WEIGHT_MAX = 1e9


class Fixed(Struct, frozen=True):
    value: int


class Uniform(Struct, frozen=True):
    low: int
    high: int


class Lognormal(Struct, frozen=True):
    median: float
    sigma: float
    low: int
    high: int


class Choice(Struct, frozen=True):
    values: tuple[int, ...]
    cumulated: tuple[float, ...]  # weights, summed up


class Listed(Struct, frozen=True):
    values: tuple[int, ...]


Distribution: TypeAlias = Fixed | Uniform | Lognormal | Choice | Listed


def pick(distribution: Distribution, number: int, chance: float) -> int:
    """Draw number `number` (from 0) of a series, at a uniform `chance` in [0, 1)."""
    match distribution:
        case Fixed():
            return distribution.value
        case Uniform():
            width = distribution.high - distribution.low + 1
            return distribution.low + min(int(chance * width), width - 1)
        case Lognormal():
            deviation = NormalDist().inv_cdf(max(chance, 2.0**-54))
            drawn = distribution.median * math.exp(distribution.sigma * deviation)
            return round(min(max(drawn, distribution.low), distribution.high))
        case Choice():
            at = bisect_right(distribution.cumulated, chance * distribution.cumulated[-1])
            return distribution.values[min(at, len(distribution.values) - 1)]
        case Listed():
            return distribution.values[number % len(distribution.values)]


def read_distribution(
    table: Table, key: str, low: float, high: float, scale: int = 1
) -> Distribution:
    """The value of `key`, all of it in [low, high] as written; drawn values are `scale` times that.

    With a scale of 1 everything must be an integer, except the median.
    """
    if not isinstance(table.value(key), dict):
        return Fixed(read_one(table, key, low, high, scale))
    inner = table.table(key)
    kind = inner.text("kind", among=KINDS)
    match kind:
        case "uniform":
            read = read_uniform(inner, low, high, scale)
        case "lognormal":
            read = read_lognormal(inner, low, high, scale)
        case "choice":
            read = read_choice(inner, low, high, scale)
        case "empirical":
            values = read_values(inner, low, high, scale)
            read = Choice(values, tuple(accumulate(1.0 for _ in values)))
        case _:
            read = Listed(read_values(inner, low, high, scale))
    inner.done()
    return read


def read_one(
    table: Table, key: str, low: float, high: float, scale: int, default: float | None = None
) -> int:
    if scale == 1:
        whole = None if default is None else int(default)
        return table.integer(key, int(low), int(high), whole)
    return round(table.number(key, low, high, default) * scale)


def read_values(table: Table, low: float, high: float, scale: int) -> tuple[int, ...]:
    if scale == 1:
        return tuple(table.integers("values", int(low), int(high)))
    return tuple(round(value * scale) for value in table.numbers("values", low, high))


def read_bounds(
    table: Table, low: float, high: float, scale: int, *, required: bool
) -> tuple[int, int]:
    first = read_one(table, "low", low, high, scale, None if required else low)
    last = read_one(table, "high", low, high, scale, None if required else high)
    if first > last:
        raise table.error("high", table.value("high"), f"must not be below low = {first / scale:g}")
    return first, last


def read_uniform(table: Table, low: float, high: float, scale: int) -> Uniform:
    return Uniform(*read_bounds(table, low, high, scale, required=True))


def read_lognormal(table: Table, low: float, high: float, scale: int) -> Lognormal:
    median = table.number("median", low, high)
    if median <= 0:
        raise table.error("median", table.value("median"), "must be above 0")
    sigma = table.number("sigma", 0, SIGMA_MAX)
    return Lognormal(median * scale, sigma, *read_bounds(table, low, high, scale, required=False))


def read_choice(table: Table, low: float, high: float, scale: int) -> Choice:
    values = read_values(table, low, high, scale)
    weights = table.numbers("weights", 0, WEIGHT_MAX)
    if len(weights) != len(values):
        must = f"must be as many as values, {len(values)}, not {len(weights)}"
        raise table.error("weights", weights, must)
    if not sum(weights):
        raise table.error("weights", weights, "must not all be 0")
    return Choice(values, tuple(accumulate(weights)))
