"""Goal: what a workload says about lengths is what is drawn.

Method: each kind at evenly spaced chances, which stand for all draws without the noise.
"""

import statistics
from pathlib import Path

import pytest

from phaseloop.engine.sim_fields import Table
from phaseloop.sim.distributions import Choice, Fixed, pick, read_distribution

EVENLY = [(n + 0.5) / 4000 for n in range(4000)]


def read(value, low=1, high=100_000, scale=1):
    return read_distribution(Table(Path("w.toml"), "", {"x": value}), "x", low, high, scale)


def drawn(value, **bounds) -> list[int]:
    return [pick(read(value, **bounds), n, chance) for n, chance in enumerate(EVENLY)]


def test_fixed():
    assert read(512) == Fixed(512)
    assert set(drawn(512)) == {512}


def test_uniform_has_both_ends_and_all_between():
    values = drawn({"kind": "uniform", "low": 3, "high": 6})
    assert [values.count(n) for n in (3, 4, 5, 6)] == [1000] * 4


def test_lognormal_has_its_median_and_its_sigma_and_stays_in_bounds():
    values = drawn({"kind": "lognormal", "median": 800, "sigma": 1.0, "low": 16, "high": 8000})
    assert statistics.median(values) == pytest.approx(800, rel=0.01)
    one_sigma = statistics.quantiles(values, n=1000)[841]  # 84.1 % lie below median * e
    assert one_sigma == pytest.approx(800 * 2.71828, rel=0.02)
    assert min(values) >= 16
    assert max(values) == 8000


def test_choice_by_weight():
    values = drawn({"kind": "choice", "values": [200, 8000], "weights": [9, 1]})
    assert (values.count(200), values.count(8000)) == (3600, 400)


def test_a_weight_of_nothing_is_never_drawn():
    assert set(drawn({"kind": "choice", "values": [1, 2, 3], "weights": [0, 1, 0]})) == {2}


def test_empirical_is_even():
    values = drawn({"kind": "empirical", "values": [7, 7, 9, 4]})
    assert [values.count(n) for n in (4, 7, 9)] == [1000, 2000, 1000]


def test_a_list_is_in_order_and_begins_again():
    assert drawn({"kind": "list", "values": [8, 5, 3]})[:7] == [8, 5, 3, 8, 5, 3, 8]


@pytest.mark.parametrize("chance", [0.0, 2.0**-53, 1 - 2.0**-53])
@pytest.mark.parametrize(
    "value",
    [
        {"kind": "uniform", "low": 3, "high": 6},
        {"kind": "lognormal", "median": 10, "sigma": 9.0, "low": 3, "high": 6},
        {"kind": "choice", "values": [3, 6], "weights": [1, 1e9]},
    ],
)
def test_the_ends_of_chance_stay_in_bounds(value, chance):
    assert 3 <= pick(read(value), 0, chance) <= 6


def test_seconds_become_nanoseconds():
    assert read(0.25, low=0, scale=10**9) == Fixed(250_000_000)
    uniform = read({"kind": "uniform", "low": 0.5, "high": 1}, low=0, scale=10**9)
    assert pick(uniform, 0, 0.0) == 500_000_000
    listed = read({"kind": "empirical", "values": [0.1, 2]}, low=0, scale=10**9)
    assert isinstance(listed, Choice)
    assert listed.values == (100_000_000, 2_000_000_000)
