"""Goal: neighbours merge in the right order, in time that no input can make quadratic.

Method: the obvious quadratic algorithm as the oracle, and a count of look-ups on long inputs.
"""

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from phaseloop.text.merging import merge


def naive(symbols, find):
    """Look at all pairs, merge the best and leftmost, start again."""
    symbols = list(symbols)
    while True:
        found = [
            (find(left, right)[0], place)
            for place, (left, right) in enumerate(pairwise(symbols))
            if find(left, right) is not None
        ]
        if not found:
            return symbols
        _, place = min(found)
        joined = find(symbols[place], symbols[place + 1])[1]
        symbols[place : place + 2] = [joined]


# Ranks by the whole text, so that several pairs share one, and by pair, as BPE has them.
TABLES = st.dictionaries(st.text("abc", min_size=2, max_size=5), st.integers(0, 4), max_size=25)
PAIRS = st.tuples(st.text("ab", min_size=1, max_size=3), st.text("ab", min_size=1, max_size=3))


@given(st.text("abcd", max_size=24), TABLES)
@example("abcd", {"ab": 2, "bc": 1, "abc": 4, "bcd": 3})  # a stale entry comes before its time
def test_like_the_obvious_way_when_texts_have_ranks(text, ranks):
    def find(left, right):
        joined = left + right
        return (ranks[joined], joined) if joined in ranks else None

    assert merge(list(text), find) == naive(text, find)


@given(st.text("ab", max_size=24), st.lists(PAIRS, unique=True, max_size=20))
def test_like_the_obvious_way_when_pairs_have_ranks(text, pairs):
    ranks = {pair: rank for rank, pair in enumerate(pairs)}

    def find(left, right):
        return (ranks[left, right], left + right) if (left, right) in ranks else None

    assert merge(list(text), find) == naive(text, find)


def test_nothing_and_one():
    assert merge([], lambda left, right: (0, left + right)) == []
    assert merge(["a"], lambda left, right: (0, left + right)) == ["a"]


@pytest.mark.parametrize("text", ["a" * 30_000, "ab" * 15_000, "abc" * 10_000])
def test_look_ups_grow_with_the_length_alone(text):
    """Each merge asks for three pairs at most, and each symbol starts with one."""
    asked = 0

    def find(left, right):
        nonlocal asked
        asked += 1
        joined = left + right
        return (len(joined), joined) if len(joined) <= 64 else None

    merged = merge(list(text), find)
    assert "".join(merged) == text
    assert len(merged) < len(text) / 16
    assert asked <= 6 * len(text)
