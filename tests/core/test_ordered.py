"""The persistent ordered list against a plain sorted list, by random operations."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phaseloop.core import ordered
from phaseloop.core.ordered import BLOCK_LENGTH_MAX, Key, Ordered

key = st.tuples(st.integers(-3, 3), st.integers(0, 1000))


def build(entries: list[Key]) -> Ordered:
    built: Ordered = ()
    for entry in entries:
        built = ordered.insert(built, entry)
    return built


def check_shape(entries: Ordered) -> None:
    assert all(0 < len(block) <= BLOCK_LENGTH_MAX for block in entries)


@given(st.lists(key, max_size=400), st.randoms(use_true_random=False))
def test_inserts_and_removals(entries: list[Key], random: Random) -> None:
    built, plain = build(entries), sorted(entries)
    check_shape(built)
    assert ordered.keys(built) == tuple(plain)
    assert ordered.first(built) == (plain[0] if plain else None)
    for _ in range(len(plain) // 2):
        gone = plain.pop(random.randrange(len(plain)))
        built = ordered.remove(built, gone)
        check_shape(built)
    assert ordered.keys(built) == tuple(plain)
    assert ordered.first(built) == (plain[0] if plain else None)


@pytest.mark.parametrize("step", [1, -1])
def test_many_blocks_in_either_direction(step: int) -> None:
    entries = [(0, i) for i in range(1000)][::step]
    built = build(entries)
    check_shape(built)
    assert len(built) > 1000 // BLOCK_LENGTH_MAX
    assert ordered.keys(built) == tuple(sorted(entries))
    for entry in entries:
        assert ordered.first(built) is not None
        built = ordered.remove(built, entry)
    assert built == ()


def test_equal_keys_are_kept_apart() -> None:
    built = build([(5, 1)] * 300)
    assert len(ordered.keys(built)) == 300
    for left in range(299, -1, -1):
        built = ordered.remove(built, (5, 1))
        assert len(ordered.keys(built)) == left


def test_inserting_leaves_the_old_list_alone() -> None:
    before = build([(0, 1), (0, 3)])
    ordered.insert(before, (0, 2))
    ordered.remove(before, (0, 1))
    assert ordered.keys(before) == ((0, 1), (0, 3))


def test_removing_what_is_not_there_is_a_fault() -> None:
    with pytest.raises(AssertionError, match="not in the ordered list"):
        ordered.remove(build([(0, 1)]), (0, 2))
