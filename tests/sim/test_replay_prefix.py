"""Goal: from what a trace shows of common beginnings follow families, and what a slot is worth.

Method: evidence is given by hand, and what follows from it compared with what was meant.
"""

from recordings import LIMITS

from phaseloop.core.policy import PRESETS
from phaseloop.core.state import initial
from phaseloop.core.vocabulary import Candidate, Request, Shared
from phaseloop.sim.replay_prefix import Kin, Prefix, Shelf


def test_links_make_families():
    kin = Kin()
    kin.link(5, 6, 40)
    kin.link(1, 2, 30)
    kin.link(2, 6, 20)
    kin.link(8, 9, 7)
    kin.link(3, 3, 9)
    kin.link(3, 4, 0)
    assert kin.prefixes() == (
        Prefix(1, 1, 30), Prefix(2, 1, 30), Prefix(5, 1, 40), Prefix(6, 1, 40),
        Prefix(8, 8, 7), Prefix(9, 8, 7),
    )  # fmt: skip


def test_long_chains_of_links_are_one_family():
    kin = Kin()
    for request_id in reversed(range(3000)):
        kin.link(request_id, request_id + 1, 10)
    assert {prefix.family for prefix in kin.prefixes()} == {0}


PREFIXES = (Prefix(0, 0, 50), Prefix(1, 0, 30), Prefix(2, 2, 9))


def test_a_slot_is_worth_what_both_share():
    shelf = Shelf(PREFIXES, held={0: (0, 45)}, seated={1: 2}, alive=())
    assert shelf.found(0, 1) == 30, "as much as the shorter prefix"
    assert shelf.found(0, 0) == 45, "as much as was kept"
    assert shelf.found(0, 2) == 0 and shelf.found(0, 77) == 0 and shelf.found(1, 2) == 0
    assert shelf.seat(0, 1) == 30
    assert shelf.found(0, 1) == 0, "taken"
    shelf.release(0, 20)
    assert shelf.found(0, 0) == 20
    shelf.release(1, 0)
    assert shelf.found(1, 2) == 0, "nothing was kept"
    shelf.release(0, 5)
    assert shelf.found(0, 0) == 5, "an idle cache that is cut"
    shelf.release(0, 0)
    assert shelf.found(0, 0) == 0, "and evicted"


def test_a_call_names_what_is_there_now():
    state = initial(LIMITS, PRESETS["mixed"])
    shelf = Shelf(PREFIXES, held={1: (0, 45)}, seated={}, alive=(0, 2))
    stored = Candidate("snapshot", 4, 1, 12)
    request = Request(
        1, 60, candidates=(Candidate("slot", 0, 7, 11), stored), shared=(Shared(9, 3),)
    )
    named = shelf.renamed(request, state)
    assert named.candidates == (Candidate("slot", 1, 0, 30), stored)
    assert named.shared == (), "too short to be worth a fork"
    long = (Prefix(0, 0, 2000), Prefix(1, 0, 1500))
    shelf = Shelf(long, held={}, seated={}, alive=(0,))
    assert shelf.renamed(request, state).shared == (Shared(0, 1500),)
    shelf.end(0)
    assert shelf.renamed(request, state).shared == ()
    alone = Request(7, 60, shared=(Shared(9, 3),))
    assert shelf.renamed(alone, state) == alone, "nothing is known of it: as recorded"
