"""Goal: an arrival says where its beginning will be when it is seated, and who computes it already.

Method: the real reducer with rounds that always succeed, no engine: what a slot holds is plain
arithmetic on lengths.  Prompts are lists of numbers whose common beginnings are plain to see.
"""

import pytest
from msgspec.structs import replace

from phaseloop.core.policy import PRESETS
from phaseloop.core.reduce import reduce
from phaseloop.core.state import Limits, initial
from phaseloop.core.vocabulary import (
    Candidate,
    DeliverTokens,
    LaunchRound,
    Produced,
    Request,
    RequestArrived,
    RequestCancelled,
    RequestSeated,
    RoundCompleted,
    SeatRequest,
    Shared,
)
from phaseloop.engine.protocol import Description
from phaseloop.engine.snapshots import Snapshots, packed
from phaseloop.ops.interface import Snapshot
from phaseloop.runtime.prefixes import PrefixIndex

A, B, C = range(1000, 1100), range(2000, 2100), range(3000, 3100)
DESCRIPTION = Description(
    name="none", slot_count=3, batch_tokens=4096, context_length=4096, page_count=64
)
LIMITS = Limits(
    slot_count=3, batch_tokens=4096, context_length=4096, page_count=64, share_length_min=50
)


class World:
    """Seats find what the index promised; token n of request r is 10,000 r + n."""

    def __init__(self, limits=LIMITS, *, reuses_generated=False, snapshots=None, **options):
        description = replace(DESCRIPTION, reuses_generated=reuses_generated)
        self.snapshots = snapshots or Snapshots(1 << 20)
        self.index = PrefixIndex(limits, description, self.snapshots, **options)
        self.state = initial(limits, PRESETS["barrier-fair"])
        self.seats = {}
        self.requests = {}
        self.flight = None
        self._given = {}

    def arrive(self, *tokens, **fields):
        """The request as it arrived."""
        prompt = [token for part in tokens for token in part]
        request = Request(len(self.requests), len(prompt), **({"output_limit": 3} | fields))
        request = self.index.place(request, prompt)
        self.requests[request.request_id] = request
        self.post(RequestArrived(at_ns=0, requests=(request,)))
        return request

    def cancel(self, request):
        self.post(RequestCancelled(at_ns=0, request_id=request.request_id))

    def post(self, event):
        before = self.state
        self.state, effects = reduce(before, event)
        self.index.observe(event, before, self.state, effects)
        for effect in effects:
            match effect:
                case LaunchRound():
                    self.flight = effect
                case DeliverTokens():
                    self._deliver(effect)
        for effect in effects:
            if isinstance(effect, SeatRequest):
                self.seats[effect.request_id] = effect
                found = 0 if effect.source is None else effect.source.length
                self.post(
                    RequestSeated(
                        at_ns=0,
                        request_id=effect.request_id,
                        choice=effect.choice,
                        slot=effect.slot,
                        cached_length=found,
                    )
                )

    def round(self):
        launch, self.flight = self.flight, None
        results = tuple(Produced(lane.outputs) for lane in launch.lanes)
        self.post(RoundCompleted(at_ns=0, round_id=launch.round_id, results=results, duration_ns=1))

    def serve(self, *tokens, **fields):
        request = self.arrive(*tokens, **fields)
        while self.flight is not None:
            self.round()
        return request

    def _deliver(self, effect):
        for one in effect.deliveries:
            count = self._given.get(one.request_id, 0)
            ids = [10_000 * one.request_id + count + n for n in range(one.tokens)]
            self._given[one.request_id] = count + one.tokens
            self.index.deliver(one, ids)


def in_slots(request):
    return [(c.index, c.version, c.length) for c in request.candidates if c.source == "slot"]


# --- slots ----------------------------------------------------------------------------------------


def test_a_next_turn_names_its_slot():
    world = World()
    assert world.serve(A).candidates == ()
    turn = world.serve(A, B)
    assert turn.candidates == (Candidate("slot", 0, 1, 100),)
    assert world.seats[turn.request_id].slot == 0
    assert in_slots(world.serve(A, B, C)) == [(0, 2, 200)]


def test_the_last_token_is_left_to_compute():
    world = World()
    world.serve(A)
    assert in_slots(world.arrive(A)) == [(0, 1, 99)]


@pytest.mark.parametrize("reuses_generated", [False, True])
def test_an_answer_belongs_to_it_where_it_can_be_reused(reuses_generated):
    """Three tokens were generated, and the last one's state was not computed."""
    world = World(reuses_generated=reuses_generated)
    world.serve(A)
    turn = world.arrive(A, (0, 1, 2), B)
    assert in_slots(turn) == [(0, 1, 102 if reuses_generated else 100)]


@pytest.mark.parametrize(
    ("similarity", "is_named"), [(0.1, False), (0.09, True), (0.0, False), (1.0, False)]
)
def test_a_slot_must_hold_more_than_a_share_of_the_prompt(similarity, is_named):
    """As --slot-prompt-similarity: 20 of 200 tokens are a tenth, and not more; 0 is never."""
    world = World(similarity=similarity)
    world.serve(A[:20])
    assert bool(in_slots(world.arrive(A[:20], B, C[:80]))) == is_named


def test_a_slot_that_would_lose_much_is_not_taken():
    """The engine copies the beginning; the line in the slot goes on."""
    world = World()
    world.serve(A, B)
    turn = world.serve(A, C)
    assert in_slots(turn) == []
    assert world.seats[turn.request_id].slot == 1
    assert in_slots(world.arrive(A, C, B[:10])) == [(1, 1, 200)]


def test_a_taken_slot_is_named_with_the_version_it_will_have():
    """It waits for the cohort; the slot it wants is released meanwhile."""
    world = World()
    world.arrive(A)
    world.round()  # the prompt; the cohort is sealed
    turn = world.arrive(A, B)
    assert in_slots(turn) == [(0, 1, 100)]
    while world.flight is not None:
        world.round()
    assert world.seats[turn.request_id].source == Candidate("slot", 0, 1, 100)


def test_a_slot_that_was_left_with_less_than_expected_is_no_source():
    world = World()
    first = world.arrive(A)
    turn = world.arrive(A, B)
    assert in_slots(turn) == [(0, 1, 100)]
    world.cancel(first)
    world.round()
    while world.flight is not None:
        world.round()
    assert world.seats[turn.request_id].slot == 1, "both were of one cohort"


def test_an_evicted_cache_holds_nothing():
    """The long prompt wants all 16 pages, and the idle cache has one of them."""
    world = World(replace(LIMITS, page_count=16))
    world.serve(A, slot_hint=0)
    assert in_slots(world.index.place(Request(90, 100), list(A))) == [(0, 1, 99)]
    world.serve(range(4090), output_limit=1, slot_hint=1)
    assert in_slots(world.arrive(A)) == []


def test_a_request_that_keeps_nothing_finds_and_leaves_nothing():
    world = World()
    world.serve(A)
    assert world.serve(A, B, keep_cache=False, slot_hint=0).candidates == ()
    assert in_slots(world.arrive(A, B)) == []


def test_other_adapters_and_embeddings_have_no_prefix():
    world = World()
    world.serve(A)
    assert in_slots(world.arrive(A, B, adapter=1)) == []
    assert world.arrive(A, B, kind="embedding", output_limit=None).candidates == ()


def test_a_snapshot_is_named_beside_slots():
    snapshots = Snapshots(1 << 20)
    ids = packed([*A, *B])
    snapshots.put(ids, 0, lambda: Snapshot(len(ids), ()))
    world = World(snapshots=snapshots)
    world.serve(A)
    turn = world.arrive(A, B, C)
    assert turn.candidates == (Candidate("slot", 0, 1, 100), Candidate("snapshot", 0, 0, 200))
    assert world.seats[turn.request_id].source == Candidate("snapshot", 0, 0, 200)


# --- requests -------------------------------------------------------------------------------------


def test_earlier_requests_with_the_same_beginning_are_named():
    """share_length_min is 50 here."""
    world = World()
    first = world.arrive(A, B)
    assert first.shared == ()
    assert world.arrive(A, C).shared == (Shared(0, 100),)
    assert world.arrive(A[:50], C).shared == (Shared(0, 50), Shared(1, 50))
    assert world.arrive(A[:49], B).shared == ()
    assert world.arrive(A[:49]).shared == ()


def test_who_has_ended_is_named_no_more():
    world = World()
    world.serve(A, B)
    assert world.arrive(A, C).shared == ()


def test_the_seated_and_the_last_that_wait_are_named():
    """Three slots: three seats, and three that a follower may sit beside."""
    world = World()
    for number in range(8):
        world.arrive(A, range(number + 1))
    ids = [one.request_id for one in world.arrive(A, B).shared]
    assert ids == [0, 1, 2, 5, 6, 7]


def test_who_shares_nothing_follows_nobody_but_may_lead():
    world = World()
    world.arrive(A, B, keep_cache=False)
    assert world.arrive(A, C, keep_cache=False).shared == ()
    assert [one.request_id for one in world.arrive(A, C).shared] == [0, 1]


def test_other_adapters_share_nothing():
    world = World()
    world.arrive(A, B)
    assert world.arrive(A, C, adapter=1).shared == ()


def test_nothing_is_remembered_of_the_ended():
    world = World()
    for _ in range(5):
        world.serve(A, B)
        world.cancel(world.arrive(B, C))
        while world.flight is not None:
            world.round()
    world.arrive(C)
    assert set(world.index._lines) == {10}
    assert sum(map(len, world.index._kin.values())) == 1


# --- models whose state cannot be cut -------------------------------------------------------------


def test_a_slot_offers_what_can_be_taken_up():
    world = World(positions=lambda slot: (60, 80, 100))
    world.serve(A)
    assert in_slots(world.arrive(A[:90], B)) == [(0, 1, 80)]
    assert in_slots(world.arrive(A[:50], B)) == []


def test_a_slot_that_is_taken_offers_all_it_may_have_by_then():
    world = World(positions=lambda slot: ())
    world.arrive(A)
    assert in_slots(world.arrive(A[:90], B)) == [(0, 1, 90)]
