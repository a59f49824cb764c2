"""Goal: the explorer visits everything there is, and what it says about it is true.

Method: small worlds of every feature hold; reducers with planted faults are caught, each with the
shortest script, which breaks the same promise when it is folded again; reducers that stand still
or run in circles are caught too; and nothing depends on the hash seed.
"""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from phaseloop.core import policy as policy_module
from phaseloop.core import reduce as reduce_module
from phaseloop.core.invariants import Violation, check
from phaseloop.core.policy import PRESETS
from phaseloop.core.reduce import reduce
from phaseloop.core.state import Flight, State
from phaseloop.core.transitions import check_step
from phaseloop.core.vocabulary import (
    AnyEvent,
    Effects,
    FinishRequest,
    LaunchRound,
    Request,
    RequestArrived,
    RequestCancelled,
    RoundCompleted,
)
from phaseloop.runtime.trace import Recorded, open_trace
from phaseloop.sim.explore import Exploration, Found, Reducer, explore
from phaseloop.sim.explore_features import FEATURES, Bounds, Setting, setting
from phaseloop.sim.explore_trace import write_script

TINY = Bounds(slots=2, requests=2, prompt_rounds=2, tokens=2, cancels=1, failures=0)
MISHAPS = Bounds(slots=2, requests=2, prompt_rounds=2, tokens=2, cancels=1, failures=1)


def explored(
    feature: str, policy: str, bounds: Bounds = TINY, step: Reducer = reduce, **options: object
) -> Exploration:
    where = setting(feature, bounds, PRESETS[policy])
    return explore(where.state, where.world, where.bound, step=step, **options)


def start(feature: str = "base", policy: str = "barrier-fair", bounds: Bounds = TINY) -> Setting:
    return setting(feature, bounds, PRESETS[policy])


# --- what holds -----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", PRESETS)
def test_every_policy_keeps_its_promises(policy):
    seen = explored("base", policy, MISHAPS)
    assert seen.violation is None and seen.complete
    assert 0 < seen.steps <= seen.bound
    assert (seen.mixed_round is not None) == (policy == "mixed")


# For each feature, effects that occur only if its alphabet does what it is there for.
REACHED = {
    "base": {"request ends: stop", "request ends: length", "request ends: cancelled"},
    "children": {"fork round: children", "seat: sibling", "request ends: exceeds_slots"},
    "groups": {"decode round: generate"},
    "embeddings": {"encode round: cohort_open", "request ends: stop"},
    "whole": {"encode round: cohort_open", "request ends: stop", "request ends: invalid"},
    "stalls": {"request ends: stalled"},
    "policy-change": {"mixed round: continuous", "prefill round: prompts_first"},
    "deadlines": {
        "request ends: deadline",
        "request ends: queue_timeout",
        "request ends: queue_full",
    },
    "memory": {"request ends: no_space", "request ends: exceeds_memory", "slot released: evicted"},
    "save": {"save round: free_memory", "restore round: resume_saved", "save round: save_idle"},
    "shared-prefix": {"fork round: shared_prefix"},
    "shared-anywhere": {"fork round: shared_prefix"},
    "shutdown": {"request ends: shutdown", "request ends: engine_lost", "Stop: shutdown"},
    "priorities": {"request ends: length"},
    "caching": {"seat: cache", "seat: hint", "restore round: restore_cache"},
    "drafts": {"decode round: generate"},
    "shift": {"shift round: context_full"},
    "pace": {"prefill round: cohort_open"},
}


CALM = replace(TINY, cancels=0)
FEATURE_BOUNDS = {
    "deadlines": replace(CALM, requests=3),  # one seated, one queued, one too many
    "policy-change": CALM,
    "stalls": CALM,
}


@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_holds_and_is_exercised(feature):
    seen = explored(feature, "barrier-fair", FEATURE_BOUNDS.get(feature, TINY))
    assert seen.violation is None and seen.complete
    assert REACHED[feature] <= seen.reached.keys()


def test_seats_are_lent_and_taken_back_under_quantum():
    seen = explored("save", "quantum", CALM)
    assert seen.violation is None and seen.complete
    assert {"save round: free_memory", "restore round: resume_saved"} <= seen.reached.keys()


@pytest.mark.parametrize("name", Bounds.__struct_fields__)
def test_more_of_anything_is_more_to_see(name):
    few = Bounds(slots=1, requests=2, prompt_rounds=1, tokens=1, cancels=0, failures=0)
    more = replace(few, **{name: getattr(few, name) + 1})
    assert explored("base", "quantum", few).states < explored("base", "quantum", more).states


def test_a_limit_stops_the_search_and_is_told():
    seen = explored("base", "barrier-fair", limit_states=50)
    assert not seen.complete and seen.violation is None and seen.steps is None
    assert 50 < seen.states < explored("base", "barrier-fair").states


# --- planted faults -------------------------------------------------------------------------------


def open_early(state, seen, prompts, can_resume):
    """The barrier opens as soon as one member is ready."""
    if seen.active:
        return "decode" if state.phase != "idle" else "prefill"
    return "prefill" if prompts or seen.saves else "idle"


def release_at_once(state: State, event: AnyEvent) -> tuple[State, Effects]:
    """A cancelled sequence gives its seat away, pages and all, while the engine is at it."""
    after, effects = reduce(state, event)
    if isinstance(event, RequestCancelled):
        slots = tuple(s if s is None or s.role != "leaving" else None for s in after.slots)
        after = replace(after, slots=slots)
    return after, effects


def forget_the_end(state: State, event: AnyEvent) -> tuple[State, Effects]:
    """A request whose round is over may end without its client being told."""
    after, effects = reduce(state, event)
    if isinstance(event, RoundCompleted):
        effects = tuple(effect for effect in effects if not isinstance(effect, FinishRequest))
    return after, effects


def raise_on_cancel(state: State, event: AnyEvent) -> tuple[State, Effects]:
    if isinstance(event, RequestCancelled) and event.request_id not in state.queue:
        raise KeyError(event.request_id)
    return reduce(state, event)


def broken(seen: Exploration) -> Found:
    assert seen.violation is not None and not seen.complete and seen.steps is None
    return seen.violation


def test_a_barrier_that_opens_early_is_caught(monkeypatch):
    monkeypatch.setattr(policy_module, "barrier_phase", open_early)
    found = broken(explored("base", "barrier-fair"))
    # Two arrive (in one call), sit down, share a round that ends one of the prompts.
    assert (found.invariant, len(found.script)) == ("I2", 4)
    assert folded(found, start()) == "I2"


def test_a_cohort_that_is_never_sealed_is_caught(monkeypatch):
    monkeypatch.setattr(reduce_module, "seal", lambda state, seen: state)
    found = broken(explored("base", "barrier-fair"))
    # One arrives, sits down, has its prompt computed: it samples, unsealed.
    assert (found.invariant, len(found.script)) == ("I3", 3)
    assert folded(found, start()) == "I3"


@pytest.mark.parametrize(
    ("step", "invariant", "length"),
    [
        (release_at_once, "I8", 3),  # arrives, sits, is cancelled in its first round
        (forget_the_end, "I11", 4),  # arrives, sits, prompt, first token ends it
        (raise_on_cancel, "core", 1),  # nobody is there: the id is unknown
    ],
)
def test_a_faulty_reducer_is_caught_by_the_shortest_script(step, invariant, length):
    found = broken(explored("base", "barrier-fair", step=step))
    assert (found.invariant, len(found.script)) == (invariant, length), found
    again = broken(explored("base", "barrier-fair", step=step, symmetric=False))
    assert (again.invariant, len(again.script)) == (invariant, length)


def folded(found: Found, where: Setting, step: Reducer = reduce) -> str | None:
    """Which promise the last event of a script breaks, and that no earlier one does."""
    state = where.state
    for number, event in enumerate(found.script, 1):
        after, effects = step(state, event)
        try:
            check_step(state, event, after, effects)
            check(after)
        except Violation as violation:
            assert number == len(found.script), "an earlier event breaks it"
            return violation.invariant
        state = after
    return None


# --- standing still, and running in circles -------------------------------------------------------


def test_a_deadlock_is_caught():
    """A world in which somebody waits and nothing is owed to anybody."""
    where = start()
    arrival = RequestArrived(at_ns=0, requests=(Request(0, prompt_length=2, output_limit=1),))
    waiting, _ = reduce(where.state, arrival)  # wants its seat answered, which no one will
    seen = explore(waiting, replace(where.world, requests=0, cancels=0), where.bound)
    found = broken(seen)
    assert (found.invariant, found.script) == ("I5", ())
    assert "deadlock: requests [0] wait" in found.message


def decode_again(state: State, event: AnyEvent) -> tuple[State, Effects]:
    """Every other decode round is repeated without its tokens: the engine is busy for nothing."""
    flight = state.flight
    repeated = isinstance(event, RoundCompleted) and flight is not None
    if repeated and flight.kind == "decode" and event.round_id == flight.round_id:
        round_id = state.round_id_next
        after = replace(
            state,
            flight=Flight(round_id, flight.kind, flight.lanes),
            round_id_next=round_id + 1,
        )
        return after, (LaunchRound(round_id, "decode", flight.lanes, "generate"),)
    return reduce(state, event)


def test_a_livelock_is_caught():
    found = broken(explored("base", "barrier-fair", step=decode_again))
    assert found.invariant == "I5" and "livelock" in found.message
    # Arrival, seat, prompt, first token; then once around the circle.
    assert [type(event).__name__ for event in found.script] == [
        "RequestArrived",
        "RequestSeated",
        *["RoundCompleted"] * 3,
    ]


def test_an_end_that_takes_longer_than_stated_is_caught():
    where = start()
    longest = explored("base", "barrier-fair").steps
    assert longest is not None
    seen = explore(where.state, where.world, bound=longest - 1)
    found = broken(seen)
    assert found.invariant == "I5"
    assert f"{longest} answers until everybody has ended" in found.message
    assert explore(where.state, where.world, bound=longest).violation is None
    # The script goes on to the end: nobody is left after it.
    state = where.state
    for event in found.script:
        state, _ = reduce(state, event)
    assert not state.queue and state.slots == (None, None)


def test_a_reducer_that_wavers_is_caught():
    calls = iter(range(1_000_000))

    def waver(state: State, event: AnyEvent) -> tuple[State, Effects]:
        after, effects = reduce(state, event)
        return replace(after, cohort=next(calls)), effects

    assert broken(explored("base", "barrier-fair", step=waver)).invariant == "I10"


# --- scripts as traces ----------------------------------------------------------------------------


def test_a_script_is_a_trace_that_replay_folds(monkeypatch, tmp_path):
    monkeypatch.setattr(policy_module, "barrier_phase", open_early)
    found = broken(explored("base", "barrier-fair"))
    path = tmp_path / "violation.jsonl"
    with path.open("wb") as out:
        assert write_script(out, start().state, found) == found.script
    with open_trace(path) as reader:
        events = [record.event for _, record in reader if isinstance(record, Recorded)]
    assert tuple(events) == found.script
    assert reader.footer is not None and reader.footer.reason == "breaks I2"


def test_a_trace_ends_before_the_event_that_raises(monkeypatch, tmp_path):
    def fail(*_: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(reduce_module, "end_request", fail)
    found = broken(explored("base", "barrier-fair"))
    assert found.invariant == "core" and "ZeroDivisionError: planted" in found.message
    with (tmp_path / "violation.jsonl").open("wb") as out:
        assert write_script(out, start().state, found) == found.script[:-1]


# --- determinism ----------------------------------------------------------------------------------


def counts_with_seed(seed: str) -> str:
    program = (
        "import msgspec\n"
        "from phaseloop.core.policy import PRESETS\n"
        "from phaseloop.sim.explore import explore\n"
        "from phaseloop.sim.explore_features import Bounds, setting\n"
        "for feature in ('groups', 'caching'):\n"
        "    where = setting(feature, Bounds(2, 2, 2, 2, 1, 0), PRESETS['barrier-fair'])\n"
        "    print(msgspec.json.encode(explore(where.state, where.world, where.bound)).decode())\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout


def test_nothing_depends_on_the_hash_seed():
    assert counts_with_seed("1") == counts_with_seed("2") != ""


# --- the invariants' own names --------------------------------------------------------------------


def violations(feature: str) -> Iterator[str]:
    for symmetric in (True, False):
        yield broken(explored(feature, "barrier-fair", symmetric=symmetric)).invariant


def test_renaming_hides_no_violation(monkeypatch):
    monkeypatch.setattr(policy_module, "barrier_phase", open_early)
    for feature in ("base", "groups", "caching"):
        assert len(set(violations(feature))) == 1
