"""The vocabulary is closed: every name is in its table, every reason occurs, all goes over a wire.

The transcripts are the material: a documented reason that none of them brings about is either dead
or untested.
"""

from functools import cache
from typing import get_args

import msgspec
import pytest
from run import Run
from transcript import play, transcripts

from phaseloop.core import vocabulary
from phaseloop.core.explain import REASONS, WaitReason, explain
from phaseloop.core.invariants import PROMISES, promises
from phaseloop.core.policy import DEFAULT, PRESETS
from phaseloop.core.reduce import reduce
from phaseloop.core.state import LIVE, Role, State, initial
from phaseloop.core.vocabulary import (
    COMPLETIONS,
    DECODE_CLASS,
    PREFILL_CLASS,
    AnyEffect,
    AnyEvent,
    Effect,
    Effects,
    Event,
    RoundKind,
)


@cache
def runs() -> tuple[Run, ...]:
    played = [play(path.read_text()).run for path in transcripts()]
    for run in played:
        run.drain()
    return tuple(played)


def states() -> list[tuple[State, int]]:
    """Every state of every transcript, with the time it was reached at."""
    found: list[tuple[State, int]] = []
    for run in runs():
        state = initial(run.shadow.limits, run.policy)
        for event in run.events:
            state, _ = reduce(state, event)
            found.append((state, event.at_ns))
    return found


def effects() -> list[AnyEffect]:
    return [effect for run in runs() for step in run.effects for effect in step]


def test_events_and_effects_are_complete() -> None:
    assert set(get_args(AnyEvent)) == set(Event.__subclasses__())
    assert set(get_args(AnyEffect)) == set(Effect.__subclasses__())
    assert set(COMPLETIONS) < set(get_args(AnyEffect))
    for answers in COMPLETIONS.values():
        assert set(answers) <= set(get_args(AnyEvent))
    assert set(get_args(RoundKind)) == {*PREFILL_CLASS, *DECODE_CLASS, "mixed"}
    assert not set(PREFILL_CLASS) & set(DECODE_CLASS)


def test_every_event_and_every_effect_occurs() -> None:
    events = {type(event) for run in runs() for event in run.events}
    assert events == set(get_args(AnyEvent))
    assert {type(effect) for effect in effects()} == set(get_args(AnyEffect))


@pytest.mark.parametrize(
    ("effect", "reasons"),
    [
        (vocabulary.FinishRequest, vocabulary.FinishReason),
        (vocabulary.SeatRequest, vocabulary.SeatReason),
        (vocabulary.LaunchRound, vocabulary.LaunchReason),
        (vocabulary.ReleaseSlot, vocabulary.ReleaseReason),
    ],
)
def test_every_reason_code_occurs(effect: type, reasons: object) -> None:
    occurred = {one.reason for one in effects() if isinstance(one, effect)}
    assert occurred == set(get_args(reasons))


def test_every_effect_carries_a_reason() -> None:
    for effect in get_args(AnyEffect):
        assert "reason" in effect.__struct_fields__, effect


def test_every_round_kind_and_role_occurs() -> None:
    kinds = {one.kind for one in effects() if isinstance(one, vocabulary.LaunchRound)}
    assert kinds == set(get_args(RoundKind))
    roles = {s.role for state, _ in states() for s in state.slots if s is not None}
    assert roles == set(get_args(Role))
    assert set(LIVE) < roles


def test_every_wait_is_documented_and_occurs() -> None:
    assert set(REASONS) == set(get_args(WaitReason))
    told = set[str]()
    for state, at_ns in states():
        seated = {s.request.request_id for s in state.slots if s is not None}
        saved = {one.sequence.request.request_id for one in state.saved}
        for request_id in sorted(seated | saved | set(state.queue)):
            told |= {one.reason for one in explain(state, request_id, at_ns)}
    assert told == set(REASONS)


def test_presets_are_named_and_promise_what_their_switch_promises() -> None:
    assert DEFAULT in PRESETS
    assert {policy.switch for policy in PRESETS.values()} == set(PROMISES)
    for name, policy in PRESETS.items():
        assert policy.name == name
        assert set(PROMISES[policy.switch]) <= set(promises(policy))
        assert ("I7" in promises(policy)) == (policy.share == "fair")
    assert "I1" not in promises(PRESETS["mixed"])


def test_a_run_goes_over_a_wire() -> None:
    for run in runs():
        for step in run.effects:
            assert msgspec.json.decode(msgspec.json.encode(step), type=Effects) == step


def test_states_are_values() -> None:
    for state, _ in states()[::20]:
        assert hash(state) == hash(msgspec.structs.replace(state))


def test_every_wait_is_expected_by_hand_somewhere() -> None:
    lines = [line for path in transcripts() for line in path.read_text().splitlines()]
    expected = {line.split()[3] for line in lines if line.startswith("expect why ")}
    assert expected == set(REASONS)


def test_the_quanta_are_the_documented_ones() -> None:
    quantum = PRESETS["quantum"]
    assert (quantum.decode_quantum_ns, quantum.prefill_quantum_ns) == (2_000_000_000, 1_000_000_000)
    assert quantum.seat_quantum_ns == 0
    assert all(policy.linger_ns == 0 for policy in PRESETS.values())
