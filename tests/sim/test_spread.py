"""Goal: percentiles are nearest-rank and exact while there are few values, close and bounded later.

Method: against NumPy's definition of the same ranks, on known and on random values.
"""

import sys

import numpy as np
import pytest

from phaseloop.sim.spread import EXACT_COUNT_MAX, Spread

PERCENTS = (1, 25, 50, 75, 95, 99, 100)


def spread_of(values) -> Spread:
    spread = Spread()
    for value in values:
        spread.add(int(value))
    return spread


def nearest_ranks(values) -> tuple[int, ...]:
    return tuple(int(np.percentile(values, p, method="inverted_cdf")) for p in PERCENTS)


@pytest.mark.parametrize("count", [1, 2, 3, 19, 20, 21, 99, 100, 101, 1000])
def test_few_values_are_exact(count):
    values = np.random.default_rng(count).lognormal(18, 2, count).astype(np.int64)
    spread = spread_of(values)
    assert spread.ranks(*PERCENTS) == nearest_ranks(values)
    assert (spread.count, spread.max, spread.sum) == (count, values.max(), values.sum())


def test_known_ranks():
    assert spread_of([15, 20, 35, 40, 50]).ranks(5, 30, 40, 50, 100) == (15, 20, 20, 35, 50)


def test_many_values_are_close():
    values = np.random.default_rng(1).lognormal(18, 2, 3 * EXACT_COUNT_MAX).astype(np.int64)
    spread = spread_of(values)
    for found, exact in zip(spread.ranks(*PERCENTS), nearest_ranks(values), strict=True):
        assert exact * (1 - 1 / 2048) <= found <= exact
    assert spread.max == spread.ranks(100)[0] == values.max()
    assert spread.sum == values.sum()


def test_memory_is_bounded():
    spread = spread_of(np.random.default_rng(1).integers(0, 10**12, 3 * EXACT_COUNT_MAX))
    assert sys.getsizeof(spread._buckets) < 4_000_000
    assert len(spread._buckets) < 2048 * 41


@pytest.mark.parametrize("already", [0, 10, EXACT_COUNT_MAX - 3, EXACT_COUNT_MAX, 70_000])
def test_a_value_added_several_times_is_that_many_values(already):
    once, several = spread_of(range(already)), spread_of(range(already))
    several.add(5_000_000, 7)
    for _ in range(7):
        once.add(5_000_000)
    assert once.ranks(*PERCENTS) == several.ranks(*PERCENTS)
    assert (once.count, once.sum, once.max) == (several.count, several.sum, several.max)


def test_a_copy_is_apart():
    spread = spread_of([1, 2, 3])
    twin = spread.copy()
    twin.add(100)
    assert (spread.max, twin.max) == (3, 100)


def test_nothing_has_no_percentiles():
    empty = Spread().percentiles()
    assert (empty.p50, empty.p95, empty.p99, empty.max) == (None, None, None, None)


def test_percentiles_are_seconds():
    found = spread_of([1_500_000_000] * 98 + [3_000_000_000, 9_000_000_000]).percentiles()
    assert (found.p50, found.p95, found.p99, found.max) == (1.5, 1.5, 3.0, 9.0)
