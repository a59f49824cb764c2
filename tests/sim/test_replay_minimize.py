"""Goal: what is left shows the fault, and nothing in it can be spared.

Method: planted faults over random lists and numbers; minimality is checked item by item.
"""

import random

import pytest

from phaseloop.sim.replay_minimize import minimal_items, minimal_number


@pytest.mark.parametrize("seed", range(20))
def test_planted_items_are_all_that_is_left(seed: int):
    draws = random.Random(seed)
    items = list(range(draws.randrange(1, 60)))
    planted = set(draws.sample(items, draws.randrange(1, min(6, len(items)) + 1)))
    tries: list[int] = []

    def shows(some: list[int]) -> bool:
        tries.append(1)
        assert some == sorted(some), "the order stays"
        return planted <= set(some)

    assert minimal_items(items, shows) == sorted(planted)
    assert len(tries) < 20 + 12 * len(planted) * len(items).bit_length()


def test_a_fault_that_needs_a_pair_at_a_distance():
    kept = minimal_items(list(range(40)), lambda some: any(x + 17 in some for x in some))
    assert len(kept) == 2 and kept[1] - kept[0] == 17


def test_nothing_is_left_where_nothing_is_needed():
    assert minimal_items([1, 2, 3], lambda some: True) == []


def test_everything_stays_where_everything_is_needed():
    assert minimal_items([1, 2, 3], lambda some: len(some) == 3) == [1, 2, 3]


@pytest.mark.parametrize(("value", "floor", "least"), [(100, 0, 37), (37, 0, 37), (1000, 37, 37)])
def test_the_smallest_number(value: int, floor: int, least: int):
    assert minimal_number(value, floor, lambda n: n >= least) == least


def test_a_number_at_its_floor_is_not_tried():
    assert minimal_number(3, 3, lambda n: pytest.fail("tried")) == 3


def test_a_fault_that_is_not_monotone_ends_in_a_local_minimum():
    kept = minimal_number(64, 0, lambda n: n % 7 == 1 and n > 0)
    assert kept % 7 == 1 and (kept - 1) % 7 != 1
