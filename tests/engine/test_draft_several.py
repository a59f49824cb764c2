"""Goal: several drafters are one: the first that has drafts gives them, all follow every slot.

Method: scripted drafters that note what they are told.
"""

import pytest

from phaseloop.engine.draft import Computed, NoDrafts, Wish
from phaseloop.engine.draft_several import Drafters
from phaseloop.engine.sampler import Draw
from phaseloop.engine.settings import GREEDY
from phaseloop.ops.interface import BackendError


class Noting(NoDrafts):
    def __init__(self, name, most, drafts, fails=False):
        self.name, self.most, self.position_bytes = name, most, 10
        self._drafts, self._fails = drafts, fails
        self.told = []

    def propose(self, wishes):
        self.told.append([(wish.slot, wish.count) for wish in wishes])
        return [self._drafts.get(wish.slot, ())[: wish.count] for wish in wishes]

    def follow(self, computed):
        self.told.append("follow")
        if self._fails:
            raise BackendError("it does not follow")

    def save(self, slot, length):
        return Kept(self.name, length)

    def restore(self, slot, state, length):
        self.told.append((slot, state, length))


class Kept:
    def __init__(self, name, length):
        self.name, self.size_bytes = name, length


def wish(slot, count=8):
    return Wish(slot, count, 0.0, Draw(slot, 0, 7, 3, (1, 2, 3), GREEDY))


def pair(**options):
    cheap = Noting("cheap", 6, {1: (5, 6)}, **options)
    dear = Noting("dear", 2, {0: (7, 8, 9), 1: (4, 4), 2: ()})
    return cheap, dear, Drafters((cheap, dear))


def test_the_second_is_asked_for_what_the_first_left_and_for_what_it_can():
    cheap, dear, both = pair()
    assert both.propose([wish(0), wish(1), wish(2)]) == [(7, 8), (5, 6), ()]
    assert cheap.told == [[(0, 6), (1, 6), (2, 6)]]
    assert dear.told == [[(0, 2), (2, 2)]]
    assert both.propose([wish(1, count=1)]) == [(5,)]
    assert len(dear.told) == 1


def test_together_they_are_what_they_are():
    _, _, both = pair()
    assert (both.name, both.most, both.position_bytes) == ("cheap,dear", 6, 20)


def test_one_that_fails_keeps_none_from_following():
    cheap, dear, both = pair(fails=True)
    with pytest.raises(BackendError, match="it does not follow"):
        both.follow([Computed(0, (1, 2), 0, generated=False)])
    assert cheap.told == dear.told == ["follow"]


def test_each_gets_its_own_state_back():
    cheap, dear, both = pair()
    saved = both.save(0, 5)
    assert saved.size_bytes == 10
    both.restore(2, saved, 4)
    assert [(slot, state.name, length) for slot, state, length in cheap.told] == [(2, "cheap", 4)]
    assert [(slot, state.name, length) for slot, state, length in dear.told] == [(2, "dear", 4)]
    both.restore(1, None, 4)
    assert cheap.told[-1] == dear.told[-1] == (1, None, 4)
