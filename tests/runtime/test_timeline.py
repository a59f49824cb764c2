"""Goal: a timeline shows each slot as it was at every moment, and says why.

Method: the example of docs/trace-format.md, whose story is told there in words; and every recorded
trace, at each step of which the reducer's own explanation must agree with the record.
"""

import itertools
import json
import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from scripted import random_events

from phaseloop.core.explain import REASONS, explain_queued, explain_seated
from phaseloop.core.policy import PRESETS
from phaseloop.core.reduce import reduce
from phaseloop.core.state import Limits, Role, State, initial
from phaseloop.core.vocabulary import AnyEvent, RoundCompleted
from phaseloop.runtime.timeline import (
    LOOKS,
    AnyRecord,
    Figures,
    Line,
    Look,
    Recorder,
    Stretch,
    Turn,
    head_of,
    look_of,
)
from phaseloop.runtime.trace import Recorded, open_trace

ROOT = Path(__file__).parents[2]
TRACES = sorted((ROOT / "fixtures" / "traces").glob("*.jsonl"))
MS = 1_000_000


def example() -> tuple[State, list[AnyEvent]]:
    """The trace in docs/trace-format.md."""
    page = (ROOT / "docs" / "trace-format.md").read_text()
    lines = page.split("<!-- tests/docs: example -->")[1].split("```")[1].splitlines()[1:]
    header = msgspec.convert(json.loads(lines[0]), type=dict)
    state = initial(
        msgspec.convert(header["limits"], Limits),
        msgspec.convert(header["policy"], type(PRESETS["mixed"])),
    )
    events = [json.loads(line) for line in lines if line.startswith('{"line":"event"')]
    return state, [msgspec.convert(one["event"], AnyEvent) for one in events]


def fold(recorder: Recorder, state: State, events, see=lambda recorder, event, state: None):
    """The last state."""
    for event in events:
        before = state
        state, effects = reduce(before, event)
        recorder.observe(event, before, state, effects)
        see(recorder, event, state)
    return state


def of_trace(path: Path) -> tuple[State, list[AnyEvent]]:
    with open_trace(path) as reader:
        events = [record.event for _, record in reader if isinstance(record, Recorded)]
        return initial(reader.header.limits, reader.header.policy), events


def of_slot(records: tuple[AnyRecord, ...], slot: int) -> list[tuple]:
    return [
        (record.at_ns / MS, record.look, record.reason, record.waits_for)
        for record in records
        if isinstance(record, Stretch) and record.slot == slot
    ]


def test_two_prompts_wait_for_each_other():
    state, events = example()
    recorder = Recorder(state, 0)
    fold(recorder, state, events)
    records = recorder.take(events[-1].at_ns)
    assert of_slot(records, 0) == [
        (0, "waiting", "being_seated", ()),
        (0.1, "prefill", "in_round", ()),
        (312, "ready", "barrier", (1,)),
        (936, "decode", "in_round", ()),
        (998, "idle", None, ()),
    ]
    assert of_slot(records, 1)[:3] == [
        (200, "waiting", "being_seated", ()),
        (200.1, "waiting", "not_its_round", (0,)),
        (312, "prefill", "in_round", ()),
    ]
    turns = [(r.at_ns / MS, r.phase, r.cohort, r.sealed) for r in records if isinstance(r, Turn)]
    assert turns == [
        (0, "prefill", 1, False),
        (312, "prefill", 1, True),
        (936, "decode", 1, True),
        (998, "idle", 1, False),
    ]


def test_tokens_are_counted():
    """300 and 600 prompt tokens; 2 and 1 tokens of answers."""
    state, events = example()
    recorder = Recorder(state, 0)
    fold(recorder, state, events)
    figures = [record for record in recorder.take(MS * 1000) if isinstance(record, Figures)]
    assert [(figures[-1].prompt_tokens, figures[-1].generated_tokens)] == [(900, 3)]


def test_figures_come_ten_times_a_second_at_most():
    state, events = example()
    recorder = Recorder(state, 0)
    fold(recorder, state, events)
    times = [r.at_ns for r in recorder.take(events[-1].at_ns) if isinstance(r, Figures)]
    assert len(times) > 2
    # The last is taken, not recorded, and may come at any time.
    assert all(b - a >= 100 * MS for a, b in itertools.pairwise(times[:-1]))


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_each_slot_looks_as_it_is_at_every_step(path):
    state, events = of_trace(path)
    recorder = Recorder(state, 0)
    known = {record.slot: record for record in recorder.standing(0) if isinstance(record, Stretch)}

    def see(recorder: Recorder, event: AnyEvent, state: State) -> None:
        for record in recorder.take(event.at_ns):
            if isinstance(record, Stretch):
                assert record.at_ns == event.at_ns
                known[record.slot] = record
        for slot, s in enumerate(state.slots):
            if s is None:
                assert known[slot].look == "idle"
                continue
            reason, _ = explain_seated(state, slot, s, event.at_ns)
            assert known[slot].look == look_of(s.role, reason)
            assert (known[slot].reason == "in_round") == (reason == "in_round")
            assert known[slot].request_id == s.request.request_id
            assert known[slot].choice == s.choice

    fold(recorder, state, events, see)


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_the_queue_is_as_long_as_told_at_every_step(path):
    state, events = of_trace(path)
    recorder = Recorder(state, 0)
    lengths = [0]

    def see(recorder: Recorder, event: AnyEvent, state: State) -> None:
        lines = [r for r in recorder.take(event.at_ns) if isinstance(r, Line)]
        lengths.extend(line.length for line in lines)
        assert lengths[-1] == len(state.queue)
        for line in lines:
            assert (line.request_id is None) == (line.length == 0)

    fold(recorder, state, events, see)
    assert len(lengths) > 1 or path.stem == "pair-barrier-fair", "there was no queue"


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_reasons_are_right_when_the_phase_turns(path):
    state, events = of_trace(path)
    recorder = Recorder(state, 0)
    turns = 0

    def see(recorder: Recorder, event: AnyEvent, state: State) -> None:
        nonlocal turns
        if not any(isinstance(record, Turn) for record in recorder.take(event.at_ns)):
            return
        turns += 1
        for record in recorder.standing(event.at_ns):
            if isinstance(record, Stretch) and record.request_id is not None:
                s = state.slots[record.slot]
                assert s is not None
                expected = explain_seated(state, record.slot, s, event.at_ns)
                assert (record.reason, record.waits_for) == expected
            elif isinstance(record, Line) and record.request_id is not None:
                pending = state.queue[record.request_id]
                expected = explain_queued(state, pending, event.at_ns)
                assert (record.reason, record.waits_for) == expected

    fold(recorder, state, events, see)
    assert turns


@pytest.mark.parametrize("seed", range(5))
def test_any_events_can_be_recorded(seed):
    """Unknown ids, late cancels and rounds that nobody launched are events, too."""
    state = initial(Limits(3, 64, 4096, 32), PRESETS["barrier-fair"])
    recorder = Recorder(state, 0)
    events = random_events(seed, 60)
    events.append(RoundCompleted(at_ns=events[-1].at_ns, round_id=999, results=(), duration_ns=1))
    fold(recorder, state, events)
    assert recorder.take(events[-1].at_ns)


def test_who_comes_late_is_told_what_the_others_know():
    state, events = of_trace(TRACES[0])
    early = Recorder(state, 0)
    half = len(events) // 2
    between = fold(early, state, events[:half])
    now_ns = events[half - 1].at_ns
    early.take(now_ns)
    late = Recorder(between, now_ns)
    told = [msgspec.to_builtins(record) for record in early.standing(now_ns)]
    fresh = [msgspec.to_builtins(record) for record in late.standing(now_ns)]
    assert [one for one in told if one[0] in ("phase", "queue")] == [
        one for one in fresh if one[0] in ("phase", "queue")
    ]
    slots = [(one[2], one[3], one[6], one[7]) for one in told if one[0] == "slot"]
    assert slots == [(one[2], one[3], one[6], one[7]) for one in fresh if one[0] == "slot"]


def test_what_nobody_takes_is_bounded():
    state, events = of_trace(TRACES[0])
    recorder = Recorder(state, 0, records_max=5)
    fold(recorder, state, events)
    assert recorder.has_overflowed
    assert len(recorder.take(events[-1].at_ns)) == 5
    assert recorder.has_overflowed, "until everything has been told anew"
    recorder.standing(events[-1].at_ns)
    assert not recorder.has_overflowed


def test_an_unusual_end_is_told():
    """engine-lost.jsonl ends with the engine: every seated request ends with it."""
    (path,) = [path for path in TRACES if path.stem == "engine-lost"]
    state, events = of_trace(path)
    recorder = Recorder(state, 0)
    fold(recorder, state, events)
    ends = [msgspec.to_builtins(r) for r in recorder.take(events[-1].at_ns)]
    reasons = {one[4] for one in ends if one[0] == "end"}
    assert reasons == {"engine_lost"}


def test_every_role_has_a_look():
    roles = get_args(Role)
    looks = {look_of(role, reason) for role in roles for reason in REASONS}
    assert looks | {"idle"} == set(get_args(Look)) == set(LOOKS)
    assert look_of("ready", "barrier") == "ready"
    assert look_of("ready", "client_stalled") == look_of("generating", "other_round") == "parked"


def test_the_head_explains_every_word():
    head = head_of(initial(Limits(2, 64, 4096, 32), PRESETS["mixed"]), "live")
    assert set(head.reasons) == set(REASONS)
    assert (head.slot_count, head.page_count, head.page_length) == (2, 32, 256)
    assert re.fullmatch(r"\d+", str(head.version))
