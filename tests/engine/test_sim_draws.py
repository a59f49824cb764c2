"""Goal: draws are uniform, independent, and a function of their key in every process.

Method: known values (they may never change: every trace depends on them), means and frequencies.
"""

import pytest

from phaseloop.engine.sim_draws import draw, successes, uniform


def test_known_values():
    known = [1466929338816962128, 15555602500777525134, 1310526025452434071]
    assert [draw(1, 2, 3), draw(1, 2), draw(123)] == known


def test_uniform_is_uniform():
    numbers = [uniform(5, n) for n in range(4000)]
    assert all(0 <= number < 1 for number in numbers)
    assert abs(sum(numbers) / 4000 - 0.5) < 0.02
    tenths = [sum(int(10 * number) == tenth for number in numbers) for tenth in range(10)]
    assert min(tenths) > 330
    assert max(tenths) < 470


@pytest.mark.parametrize("per_million", [0, 1, 250_000, 735_300, 999_999, 1_000_000])
def test_successes_stop_at_the_first_failure(per_million):
    runs = [successes(per_million, 3, 9, n) for n in range(4000)]
    chance = per_million / 1_000_000
    expected = chance + chance**2 + chance**3
    assert set(runs) <= {0, 1, 2, 3}
    assert sum(runs) / 4000 == pytest.approx(expected, abs=0.06)


def test_no_trials_no_successes():
    assert successes(1_000_000, 0, 1) == 0


def test_the_longest_run_is_that_of_the_limit():
    assert successes(1_000_000, 32, 1) == 32
