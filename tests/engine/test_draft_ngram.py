"""Goal: n-gram drafts are what followed the same tokens before, and nothing else.

Method: small texts whose repetitions are plain to see, and random ones against a plain search.
"""

import numpy as np
import pytest

from phaseloop.engine.draft import Wish
from phaseloop.engine.draft_ngram import NgramDrafter, Ngrams, continuation
from phaseloop.engine.sampler import Draw
from phaseloop.engine.settings import GREEDY


def found(text, count=8, **settings):
    return continuation(np.array(text, np.int32), Ngrams(**{"size_n": 3} | settings), count)


def test_what_followed_before():
    assert found([9, 1, 2, 3, 4, 5, 6, 7, 1, 2, 3], count=4) == (4, 5, 6, 7)


def test_the_latest_place_counts():
    assert found([1, 2, 3, 4, 0, 1, 2, 3, 5, 0, 1, 2, 3], count=1) == (5,)


def test_a_text_that_has_come_full_circle_goes_on_so():
    assert found([7, 1, 2, 3, 1, 2, 3], count=7) == (1, 2, 3, 1, 2, 3, 1)
    assert found([4, 4, 4, 4], count=5) == (4, 4, 4, 4, 4)


@pytest.mark.parametrize("text", [[], [1], [1, 2, 3], [1, 2, 3, 4], [1, 2, 0, 3, 1, 2, 3]])
def test_nothing_where_the_last_tokens_are_new(text):
    assert found(text) == ()


def test_fewer_hits_than_asked_for_are_none():
    twice = [1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3]
    assert found(twice, count=1, min_hits=2) == (8,)
    assert found(twice, count=1, min_hits=3) == ()


def plain(text, size, count):
    last = text[-size:]
    for end in range(len(text) - 1, size - 1, -1):
        if text[end - size : end] == last:
            circle = text[end:]
            return tuple(circle[place % len(circle)] for place in range(count))
    return ()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_random_texts_as_a_plain_search_has_them(size):
    random = np.random.default_rng(size)
    some = 0
    for _ in range(300):
        text = random.integers(0, 3, random.integers(1, 40)).tolist()
        expected = plain(text, size, 6) if len(text) > size else ()
        assert found(text, count=6, size_n=size) == expected, text
        some += bool(expected)
    assert some > 30


def wish(slot, tokens, count=4):
    return Wish(slot, count, 0.0, Draw(1, 0, 7, len(tokens), tokens, GREEDY))


def drafter(**settings):
    return NgramDrafter(Ngrams(**{"size_n": 2} | settings), slot_count=2)


def test_slots_keep_apart_and_grow():
    one = drafter(size_m=3)
    first, second = [5, 6, 7, 5, 6], [8, 9, 1, 8, 9]
    assert one.propose([wish(0, first), wish(1, second)]) == [(7, 5, 6), (1, 8, 9)]
    longer = [*first, 3, 4, *range(100, 3000), 6, 3]
    assert one.propose([wish(0, longer, count=2)]) == [(4, 100)]


def test_a_slot_that_was_cut_goes_on_with_other_tokens():
    one = drafter()
    one.propose([wish(0, [1, 2, 3, 4, 5, 6])])
    one.truncate(0, 3)
    assert one.propose([wish(0, [1, 2, 3, 9, 2, 3], count=1)]) == [(9,)]


def test_a_slot_that_took_another_sequence_forgets_its_own():
    one = drafter()
    one.propose([wish(0, [1, 2, 3, 1, 2]), wish(1, [4, 5, 6])])
    one.fork(1, 0, 3)
    assert one.propose([wish(0, [4, 5, 6, 4, 5], count=1)]) == [(6,)]
    one.restore(0, None, 2)
    assert one.propose([wish(0, [7, 8, 0, 7, 8], count=1)]) == [(0,)]


def test_a_slot_that_lost_its_middle():
    one = drafter()
    one.propose([wish(0, [1, 2, 3, 4, 5])])
    one.shift(0, 1, 2)
    assert one.propose([wish(0, [1, 4, 5, 1, 4], count=1)]) == [(5,)]
