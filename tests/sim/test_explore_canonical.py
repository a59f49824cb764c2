"""Goal: the explorer's keys forget nothing that matters, and almost all that does not.

Method: all pairs of situations of a small world that have one key are compared by what can happen
next (the keys of all their successors); worlds are explored with and without renaming; and every
field of the state is changed in turn, which must change the key unless the field is listed here.
"""

from collections import Counter
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from phaseloop.core.policy import PRESETS
from phaseloop.core.reduce import reduce
from phaseloop.core.state import Cache, Flight, Follow, Pace, Pending, Saved, Sequence, State, Turn
from phaseloop.core.vocabulary import Lane, Request
from phaseloop.sim.enabled import TICK_NS, Alphabet, World, after, answers, surprises
from phaseloop.sim.explore import explore
from phaseloop.sim.explore_canonical import Canon, Key
from phaseloop.sim.explore_features import FEATURES, Bounds, setting

SMALL = Bounds(slots=2, requests=2, prompt_rounds=2, tokens=1, cancels=1, failures=0)
CALM = replace(SMALL, cancels=0)
ALIKE_MAX = 3  # situations of one key that are compared with its first
SITUATIONS_MAX = 500  # per world

Future = tuple[Counter[Key], Counter[Key]]


# --- nothing that matters is forgotten ------------------------------------------------------------


@pytest.mark.parametrize("policy", ["mixed", "barrier-fair", "barrier-serial", "quantum"])
@pytest.mark.parametrize("feature", FEATURES)
def test_what_has_one_key_has_one_future(feature, policy):
    where = setting(feature, SMALL, PRESETS[policy])
    canon = Canon(where.state, where.world)
    futures: dict[Key, Future] = {}
    alike: Counter[Key] = Counter()
    compared = 0
    for state, world in situations(where.state, where.world, canon):
        key = canon.key(state, world)
        if key not in futures:
            futures[key] = future(canon, state, world)
        elif alike[key] < ALIKE_MAX:
            alike[key] += 1
            compared += 1
            assert future(canon, state, world) == futures[key]
    assert compared > 20


def situations(state: State, world: World, canon: Canon) -> Iterator[tuple[State, World]]:
    """Breadth first, once for every way to get there from a situation of a new key."""
    seen: set[Key] = set()
    layer = [(state, world)]
    while layer:
        following: list[tuple[State, World]] = []
        for one in layer:
            yield one
            key = canon.key(*one)
            if key in seen or len(seen) >= SITUATIONS_MAX:
                continue
            seen.add(key)
            following += successors(*one)
        layer = following


def successors(state: State, world: World) -> Iterator[tuple[State, World]]:
    for generate in (answers, surprises):
        for event in generate(state, world):
            state_after, effects = reduce(state, event)
            yield state_after, after(world, event, effects)


def future(canon: Canon, state: State, world: World) -> Future:
    owed: Counter[Key] = Counter()
    other: Counter[Key] = Counter()
    for generate, keys in ((answers, owed), (surprises, other)):
        for event in generate(state, world):
            state_after, effects = reduce(state, event)
            keys[canon.key(state_after, after(world, event, effects))] += 1
    return owed, other


@pytest.mark.parametrize("feature", ["base", "children", "shared-prefix", "deadlines"])
@pytest.mark.parametrize("policy", ["barrier-fair", "quantum"])
def test_renaming_changes_the_number_of_states_and_nothing_else(feature, policy):
    where = setting(feature, SMALL, PRESETS[policy])
    short = explore(where.state, where.world, where.bound)
    full = explore(where.state, where.world, where.bound, symmetric=False)
    assert short.states < full.states
    assert short.violation is None and full.violation is None
    assert (short.depth, short.steps) == (full.depth, full.steps)
    assert short.reached.keys() == full.reached.keys()


# --- every field is accounted for -----------------------------------------------------------------

# What a key leaves out, for the reasons given in explore_canonical.py.
LEFT_OUT = {
    State: {
        "limits",  # never change
        "caches",  # see test_a_cache_counts
        "order",  # gives the queue its order, which is kept
        "phase_since_ns",  # kept under quantum only, as what is left of the slice
        "phase_rounds",  # kept under quantum only
        "phase_groups",  # kept under quantum, or with several groups
        "cohort",
        "decode_turns",  # kept with several groups
        "paces",  # kept where rounds are bounded in time
        "request_id_last",
        "round_id_next",
        "ticket_next",
    },
    Sequence: {
        "ticket",  # kept as the order of slots
        "arrived_ns",  # its deadline is among the timers
        "seated_ns",  # kept with a seat quantum
        "group",  # follows from the request
        "output_limit",  # follows from the request
    },
}

REQUEST = Request(5, prompt_length=4, output_limit=3, keep_cache=False)
WAITING = Request(6, prompt_length=2, output_limit=1, keep_cache=False)
SEQUENCE = Sequence(
    request=REQUEST,
    choice=0,
    ticket=7,
    arrived_ns=0,
    seated_ns=0,
    group=(0, "completion"),
    role="prefilling",
    length=2,
    cached=0,
    produced=0,
    output_limit=3,
    pages=4,
)
LANE = Lane(0, 5, 0, 2, 2, 0)
OTHERWISE: dict[str, object] = {  # another value for each field; where it is absent, one more
    "slots": (replace(SEQUENCE, length=3), None),
    "policy": PRESETS["barrier-greedy"],
    "queue": None,
    "order": (((0, 6), (0, 8)),),
    "timers": (((3, 5),),),
    "saved": (Saved(replace(SEQUENCE, choice=1), 0, "memory"),),
    "phase": "decode",
    "phase_groups": ((0, "completion"),),
    "sealed": True,
    "prefill_turns": (Turn((0, "completion"), 3),),
    "decode_turns": (Turn((0, "completion"), 3),),
    "flight": Flight(0, "prefill", (replace(LANE, count=1),)),
    "paces": (Pace("prefill", 4, 9),),
    "linger_until_ns": 5,
    "policy_pending": PRESETS["quantum"],
    "shutdown_at_ns": 5,
    "stopped": True,
    "request": replace(REQUEST, prompt_length=5),
    "group": (1, "completion"),
    "role": "ready",
    "follow": Follow(1, 6, 1),
    "resume": "ready",
    "swap_for": "memory",
    "stalled_until_ns": 5,
}


def situation() -> tuple[Canon, State, World]:
    where = setting("base", SMALL, PRESETS["barrier-fair"])
    alphabet = Alphabet((REQUEST, WAITING), ((0,), (1,)))
    state = replace(
        where.state,
        slots=(SEQUENCE, None),
        queue=where.state.queue.set(6, Pending(WAITING, 0)),
        order=(((0, 6),),),
        phase="prefill",
        flight=Flight(0, "prefill", (LANE,)),
        request_id_last=6,
        round_id_next=1,
        ticket_next=8,
    )
    world = replace(where.world, alphabet=alphabet)
    return Canon(state, world), state, world


def otherwise(name: str, value: object) -> object:
    return OTHERWISE[name] if name in OTHERWISE else value + 1


@pytest.mark.parametrize("name", [n for n in State.__struct_fields__ if n not in ("limits",)])
def test_a_field_of_the_state_counts_or_is_listed(name):
    canon, state, world = situation()
    value = otherwise(name, getattr(state, name)) if name != "caches" else (Cache(), Cache(1))
    changed = replace(state, **{name: value})
    if name == "queue":
        changed = replace(state, queue=state.queue.set(6, Pending(REQUEST, 0)))
    if name == "order":
        return  # an order without its requests is no state
    same = canon.key(changed, world) == canon.key(state, world)
    assert same == (name in LEFT_OUT[State])


@pytest.mark.parametrize("name", Sequence.__struct_fields__)
def test_a_field_of_a_sequence_counts_or_is_listed(name):
    canon, state, world = situation()
    changed = replace(SEQUENCE, **{name: otherwise(name, getattr(SEQUENCE, name))})
    moved = replace(state, slots=(changed, None))
    same = canon.key(moved, world) == canon.key(state, world)
    assert same == (name in LEFT_OUT[Sequence])


@pytest.mark.parametrize("cache", [Cache(length=1), Cache(pages=1)])
def test_a_cache_counts(cache):
    canon, state, world = situation()
    changed = replace(state, caches=(state.caches[0], cache))
    assert canon.key(changed, world) != canon.key(state, world)


@pytest.mark.parametrize("name", ["requests", "cancels", "failures", "extras"])
def test_what_may_still_happen_counts(name):
    canon, state, world = situation()
    more = replace(world, **{name: getattr(world, name) + 1})
    assert canon.key(state, more) != canon.key(state, world)


# --- almost nothing else counts -------------------------------------------------------------------


def test_names_and_the_clock_do_not_count():
    canon, state, world = situation()
    later = 9 * TICK_NS
    request, waiting = replace(REQUEST, request_id=15), replace(WAITING, request_id=16)
    moved = replace(
        state,
        slots=(None, replace(SEQUENCE, request=request, ticket=17)),
        queue=state.queue.delete(6).set(16, Pending(waiting, later)),
        order=(((0, 16),),),
        flight=Flight(30, "prefill", (replace(LANE, slot=1, request_id=15),)),
        request_id_last=16,
        round_id_next=31,
        ticket_next=18,
    )
    assert canon.key(moved, replace(world, now_ns=later)) == canon.key(state, world)


def test_a_threshold_counts_until_it_is_reached():
    canon, state, world = situation()
    timed = replace(state, timers=(((2 * TICK_NS, 5),),))
    keys = [canon.key(timed, replace(world, now_ns=ticks * TICK_NS)) for ticks in range(5)]
    assert len(set(keys[:3])) == 3
    assert len(set(keys[2:])) == 1
