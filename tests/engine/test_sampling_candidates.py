"""Goal: the best candidates are found as a full sort would find them, whatever the shortcut.

Method: hypothesis over values with many ties and over sizes on both sides of each shortcut, against
Python's own sort and sums.
"""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phaseloop.engine.sampling_candidates import (
    CHUNKS_EACH,
    FIRST_LOOK,
    Candidates,
    count_up,
    leading,
    leading_until,
)

SIZES = st.one_of(st.integers(1, 300), st.integers(1, 6000))
SPREADS = st.sampled_from([1, 3, 50, 10**6])  # distinct values: all ties, many, few, hardly any


@st.composite
def arrays(draw):
    seed, size, spread = draw(st.integers(0, 2**32 - 1)), draw(SIZES), draw(SPREADS)
    values = np.random.default_rng(seed).integers(0, spread, size)
    return (values / 7 - spread / 9).astype(draw(st.sampled_from([np.float32, np.float64])))


def sort(values):
    return sorted(range(len(values)), key=lambda place: (-values[place], place))


@given(arrays(), st.one_of(st.integers(0, 100), st.integers(0, 7000)))
def test_leading_is_the_head_of_the_sort(values, count):
    assert leading(values, count).tolist() == sort(values.tolist())[:count]


def test_leading_takes_each_of_its_ways():
    values = np.random.default_rng(3).standard_normal(CHUNKS_EACH * 100 + 7).astype(np.float32)
    order = sort(values.tolist())
    for count in (1, 100, 101, len(values) - 1, len(values), len(values) + 1):
        assert leading(values, count).tolist() == order[:count]


@given(arrays(), st.floats(0, 1))
def test_leading_until_takes_as_few_as_reach_the_target(values, share):
    weights = np.exp2(-np.arange(len(values)) % 40.0)  # sums are exact
    target = share * float(weights.sum())
    order, total, expected = sort(values.tolist()), 0.0, []
    for place in order:
        expected.append(place)
        total += weights[place]
        if total >= target:
            break
    assert leading_until(values, weights, target).tolist() == expected


def test_leading_until_goes_on_looking():
    """Equal weights: half of them are many more than are looked at first."""
    values = np.zeros(50 * FIRST_LOOK)
    weights = np.ones(len(values))
    assert leading_until(values, weights, len(values) / 2).tolist() == list(range(25 * FIRST_LOOK))
    assert len(leading_until(values, weights, 1.0, at_least=2 * FIRST_LOOK)) == 2 * FIRST_LOOK


@pytest.mark.parametrize(
    ("weights", "target", "count"),
    [
        ([0.5, 0.25, 0.25], 0.0, 1),
        ([0.5, 0.25, 0.25], 0.5, 1),
        ([0.5, 0.25, 0.25], 0.51, 2),
        ([0.5, 0.25, 0.25], 1.0, 3),
        ([0.5, 0.25, 0.25, 0.0, 0.0], 1.5, 3),  # more than there is: none without a weight
        ([1.0], math.inf, 1),
    ],
)
def test_count_up(weights, target, count):
    assert count_up(np.array(weights), target) == count


def test_impossible_tokens_are_dropped_but_counted():
    row = np.array([1.0, -np.inf, 2.0, -np.inf, 0.5], np.float32)
    candidates = Candidates(row)
    assert candidates.ids.tolist() == [0, 2, 4]
    assert (len(candidates), candidates.counted) == (3, 5)
    candidates.keep_best(4)
    assert candidates.ids.tolist() == [2, 0, 4]
    assert (len(candidates), candidates.counted) == (3, 4)
    candidates.keep_best(2)
    assert (len(candidates), candidates.counted) == (2, 2)


def test_a_change_restores_the_order_by_id():
    candidates = Candidates(np.array([1.0, 3.0, 2.0, 0.0], np.float32))
    candidates.keep_best(3)
    assert candidates.ids.tolist() == [1, 2, 0]
    candidates.change(np.array([0]), np.array([-5.0]))
    assert candidates.ids.tolist() == [0, 1, 2]
    assert candidates.logits.tolist() == [1.0, -5.0, 2.0]
    assert candidates.best(3).tolist() == [2, 0, 1]


def test_a_row_is_never_written_to():
    row = np.array([1.0, 3.0, 2.0], np.float32)
    candidates = Candidates(row)
    candidates.change(np.array([1]), np.array([9.0]))
    assert row.tolist() == [1.0, 3.0, 2.0]
