"""Goal: a trace says exactly what happened, survives a crash, and no alteration goes unnoticed.

Method: record runs of a scripted engine in virtual time, read them back, then tear and edit the
bytes at many places.  `verify` does what a replay does: folds the events and compares all digests.
"""

import gc
import json
import random
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from io import BytesIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw
from scripted import BareWorld, ScriptedEngine, arrival, header_for, random_events, record, verify

from phaseloop.core.policy import PRESETS
from phaseloop.core.state import Limits, initial
from phaseloop.core.vocabulary import (
    AnyEvent,
    EngineLost,
    Failed,
    PolicyChanged,
    Produced,
    RequestCancelled,
    RequestSeated,
    RoundCompleted,
    RoundFailed,
    ShutdownRequested,
    StopMatched,
)
from phaseloop.runtime.digest import encode
from phaseloop.runtime.loop import run_virtual
from phaseloop.runtime.trace import (
    CHECKPOINT_EVENTS,
    FLUSH_BYTES,
    Checkpoint,
    EventLine,
    Footer,
    Recorded,
    TraceError,
    TraceWriter,
    open_trace,
)

STATE = initial(Limits(2, 64, 4096, 64), PRESETS["quantum"])


@pytest.fixture(scope="module")
def whole() -> bytes:
    return record()


@pytest.fixture
def save(tmp_path: Path) -> Callable[[bytes], Path]:
    def write(content: bytes) -> Path:
        path = tmp_path / "trace.jsonl"
        path.write_bytes(content)
        return path

    return write


def refused(path: Path) -> TraceError:
    with pytest.raises(TraceError) as caught, open_trace(path) as reader:
        for _ in reader:
            pass
    return caught.value


# --- what is written ------------------------------------------------------------------------------


def test_a_run_reads_back_as_it_was(save, whole):
    with open_trace(save(whole)) as reader:
        records = list(reader)
    assert reader.header.policy == PRESETS["barrier-fair"]
    assert reader.torn_line is None
    assert records[-1][1] is reader.footer
    assert [number for number, _ in records] == list(range(2, len(records) + 2))
    events = [one.event for _, one in records if isinstance(one, Recorded)]
    checkpoints = [one.events for _, one in records if isinstance(one, Checkpoint)]
    assert len(events) > 150
    assert reader.footer == Footer("shutdown", 0, len(events), reader.footer.chain)
    assert checkpoints == [*range(CHECKPOINT_EVENTS, len(events), CHECKPOINT_EVENTS), len(events)]
    asked = random_events(0, 40)
    assert [e for e in events if isinstance(e, type(asked[0]))] == [
        e for e in asked if isinstance(e, type(asked[0]))
    ]
    assert verify(reader.path)


def test_long_runs_have_a_checkpoint_every_256_events(save):
    with open_trace(save(record(requests=400))) as reader:
        found = [one.events for _, one in reader if isinstance(one, Checkpoint)]
    assert found[:3] == [256, 512, 768]
    assert verify(reader.path)


def test_lines_are_canonical_json(whole):
    for line in whole.splitlines():
        assert json.dumps(json.loads(line), separators=(",", ":")).encode() == line


def test_the_event_line_written_by_hand_is_the_encoded_one(whole):
    for line in whole.splitlines():
        if line.startswith(b'{"line":"event"'):
            fields = json.loads(line)
            event = line[line.index(b'"event":{') + 8 : line.rindex(b',"chain"')]
            assert encode(EventLine(fields["seq"], Raw(event), fields["chain"])) == line


def test_the_header_states_every_limit_even_at_its_default(whole):
    header = json.loads(whole.splitlines()[0])
    assert set(header["limits"]) == set(Limits.__struct_fields__)
    assert header["format"] == 1
    assert header["content"] == "counts"


def test_runs_are_equal_whatever_the_hash_seed(whole):
    program = "import scripted, sys; sys.stdout.buffer.write(scripted.record())"
    for hash_seed in ("0", "4711"):
        again = subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            check=True,
        )
        assert again.stdout == whole


def test_a_run_without_events_has_a_checkpoint_and_a_footer(save):
    out = BytesIO()
    TraceWriter(out, header_for(STATE), STATE).close("shutdown", 0)
    with open_trace(save(out.getvalue())) as reader:
        records = [one for _, one in reader]
    assert [type(one) for one in records] == [Checkpoint, Footer]
    assert verify(reader.path)


def test_nothing_reaches_the_file_before_a_flush():
    out = BytesIO()
    writer = TraceWriter(out, header_for(STATE), STATE)
    writer.append(ShutdownRequested(at_ns=0), STATE, STATE, ())
    assert out.getvalue() == b""
    writer.flush()
    assert out.getvalue().count(b"\n") == 2


def test_the_writer_holds_a_bounded_amount_back():
    out = BytesIO()
    writer = TraceWriter(out, header_for(STATE), STATE)
    reason = "x" * 1000
    for _ in range(FLUSH_BYTES // 1000 + 1):
        writer.append(EngineLost(at_ns=0, reason=reason), STATE, STATE, ())
    assert len(out.getvalue()) >= FLUSH_BYTES


EVENTS = st.one_of(
    st.builds(
        RequestSeated,
        at_ns=st.just(0),
        request_id=st.integers(0, 2**40),
        choice=st.integers(0, 9),
        slot=st.integers(-1, 9),
        restore=st.booleans(),
    ),
    st.builds(
        RoundCompleted,
        at_ns=st.just(0),
        round_id=st.integers(0, 2**62),
        results=st.lists(
            st.builds(Produced, st.integers(0, 9), st.booleans()) | st.builds(Failed, st.text())
        ).map(tuple),
        duration_ns=st.integers(0, 2**62),
    ),
    st.builds(RoundFailed, at_ns=st.just(0), round_id=st.integers(), reason=st.text()),
    st.builds(EngineLost, at_ns=st.just(0), reason=st.text()),
    st.builds(StopMatched, at_ns=st.just(0), request_id=st.integers(0, 99)),
    st.builds(PolicyChanged, at_ns=st.just(0), policy=st.sampled_from(list(PRESETS.values()))),
)


@given(st.lists(EVENTS, max_size=12))
def test_whatever_was_written_is_read(tmp_path_factory, events: list[AnyEvent]):
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    with path.open("wb") as out:
        writer = TraceWriter(out, header_for(STATE), STATE)
        for event in events:
            writer.append(event, STATE, STATE, ())
        writer.close("end", 0)
    with open_trace(path) as reader:
        assert [one.event for _, one in reader if isinstance(one, Recorded)] == events


# --- torn -----------------------------------------------------------------------------------------


def test_torn_at_every_byte_of_the_last_lines(save, whole):
    ends = [i for i, byte in enumerate(whole) if byte == ord("\n")]
    for length in range(ends[-4] + 1, len(whole)):
        torn = whole[:length]
        with open_trace(save(torn)) as reader:
            last = max(number for number, _ in reader)
        assert last == torn.count(b"\n")
        assert reader.footer is None
        assert reader.torn_line == (None if torn.endswith(b"\n") else last + 1)


def test_torn_in_the_header(save, whole):
    header_end = whole.index(b"\n")
    for length in range(header_end + 1):
        error = refused(save(whole[:length]))
        assert error.line == 1
        assert "no header" in str(error)


def test_a_crash_leaves_the_round_that_was_running():
    out = BytesIO()
    engine = ScriptedEngine()
    world = BareWorld(engine, out=out)

    def crash(launch: object) -> None:
        raise SystemExit

    engine.on_run = crash
    world.clock.post(arrival(0, 0))
    with pytest.raises(SystemExit):
        run_virtual(world.stepper, world.clock)
    last = json.loads(out.getvalue().splitlines()[-1])
    assert last["event"]["event"] == "RequestSeated"  # what the launch was decided upon


# --- edited ---------------------------------------------------------------------------------------


def test_no_changed_byte_goes_unnoticed(save, whole):
    draw = random.Random(5)
    for _ in range(300):
        at = draw.randrange(len(whole))
        byte = draw.choice(b'0123456789abcdef",:{}[] \n-eE.\xff\x00')
        edited = bytearray(whole)
        if edited[at] == byte:
            continue
        edited[at] = byte
        with suppress(TraceError):
            assert not verify(save(bytes(edited))), f"byte {at} became {byte}"


@pytest.mark.parametrize("line", [1, 2, 7, -2, -1])
def test_no_lost_doubled_or_swapped_line_goes_unnoticed(save, whole, line):
    lines = whole.splitlines(keepends=True)
    line %= len(lines)
    without = lines[:line] + lines[line + 1 :]
    doubled = lines[: line + 1] + lines[line:]
    swapped = [*lines[: line - 1], lines[line], lines[line - 1], *lines[line + 1 :]]
    for edited in (without, doubled, swapped):
        with suppress(TraceError):
            assert not verify(save(b"".join(edited)))


def edit(whole: bytes, number: int, change: Callable[[dict], object]) -> bytes:
    lines = whole.splitlines()
    fields = json.loads(lines[number - 1])
    change(fields)
    lines[number - 1] = json.dumps(fields, separators=(",", ":")).encode()
    return b"\n".join(lines) + b"\n"


def set_at(path: str, value: object) -> Callable[[dict], object]:
    *parents, last = path.split(".")

    def change(fields: dict) -> None:
        for name in parents:
            fields = fields[name]
        fields[last] = value

    return change


@pytest.mark.parametrize(
    ("number", "path", "value", "field", "message"),
    [
        (1, "format", 2, "format", "trace format 2"),
        (1, "line", "event", "line", "the first line is not one"),
        (1, "limits.slot_count", "two", "limits.slot_count", "expected `int`, got `str`"),
        (1, "policy.share", "greedier", "policy.share", "invalid enum value 'greedier'"),
        (1, "content", "bits", "content", "invalid enum value 'bits'"),
        (1, "surplus", 1, "surplus", "contains unknown"),
        (3, "line", "comment", "line", "invalid value 'comment'"),
        (3, "line", "header", None, None),
        (3, "seq", 2, "seq", "out of order: 2 where 1 is due"),
        (3, "seq", 10**30, "seq", "out of order"),
        (3, "seq", None, "seq", "expected `int`, got `null`"),
        (3, "surplus", 1, "surplus", "contains unknown"),
        (3, "event.event", "RequestVanished", "event.event", "invalid value 'RequestVanished'"),
        (3, "event.at_ns", -1, "event.at_ns", "-1 ns is negative"),
        (3, "event.at_ns", 2**63, "event.at_ns", "beyond 2**63"),
        (3, "event.at_ns", 1.5, "event.at_ns", "expected `int`, got `float`"),
        (3, "event", [], "event", "expected `object`, got `array`"),
        (-1, "events", 3, "events", "counts 3 events where"),
        (-1, "reason", "because", "chain", "does not follow"),
        (-1, "exit_code", 10**30, "chain", "does not follow"),
        (-2, "events", 3, "events", "counts 3 events where"),
    ],
)
def test_edited_fields_are_named(save, whole, number, path, value, field, message):
    count = whole.count(b"\n")
    number = number if number > 0 else count + 1 + number
    error = refused(save(edit(whole, number, set_at(path, value))))
    assert error.line == number
    if field is not None:
        assert (error.field, message in str(error)) == (field, True), str(error)
    assert f"trace.jsonl, line {number}" in str(error)


@pytest.mark.parametrize(
    ("number", "path", "name"),
    [(1, "", "core"), (3, "", "seq"), (3, "event.", "at_ns"), (3, "event.", "event")],
)
def test_missing_fields_are_named(save, whole, number, path, name):
    def drop(fields: dict) -> None:
        (fields["event"] if path else fields).pop(name)

    error = refused(save(edit(whole, number, drop)))
    assert (error.line, error.field) == (number, path + name)
    assert "missing required" in str(error)


def test_time_that_goes_back_is_refused(save, whole):
    numbers = [
        number
        for number, line in enumerate(whole.splitlines(), start=1)
        if json.loads(line).get("event", {}).get("at_ns", 0) > 0
    ]
    error = refused(save(edit(whole, numbers[5], set_at("event.at_ns", 0))))
    assert (error.line, error.field) == (numbers[5], "event.at_ns")
    assert "goes back in time" in str(error)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\n", "truncated"),
        (b"not json\n", "malformed"),
        (b"\xff\xfe\n", "malformed"),
        (b'{"line":"event","seq":0,"event":' + b"[" * 100_000 + b"\n", "nested too deeply"),
        (b"[]\n", "expected `object`, got `array`"),
    ],
)
def test_lines_that_are_no_json_objects(save, whole, content, message):
    header = whole[: whole.index(b"\n") + 1]
    error = refused(save(header + content))
    assert error.line == 2
    assert message in str(error)


def test_other_spellings_of_a_line_are_refused(save, whole):
    lines = whole.splitlines(keepends=True)
    spaced = lines[2].replace(b'"seq":', b'"seq": ')
    doubled = lines[2].replace(b'"seq":1,', b'"seq":0,"seq":1,')
    for spelling in (spaced, doubled):
        assert spelling != lines[2]
        error = refused(save(b"".join([*lines[:2], spelling, *lines[3:]])))
        assert error.line == 3
        assert "not as phaseloop writes it" in str(error)


def test_a_missing_checkpoint_is_refused(save):
    lines = record(requests=400).splitlines(keepends=True)
    places = [i for i, line in enumerate(lines) if line.startswith(b'{"line":"checkpoint"')]
    error = refused(save(b"".join(lines[: places[0]] + lines[places[0] + 1 :])))
    assert (error.line, error.field) == (places[0] + 1, "line")
    assert "a checkpoint of 256 events is missing" in str(error)


def test_a_checkpoint_between_events_is_refused(save, whole):
    lines = whole.splitlines(keepends=True)
    out = BytesIO()
    TraceWriter(out, header_for(STATE), STATE).close("end", 0)
    early = out.getvalue().splitlines(keepends=True)[1]
    error = refused(save(b"".join([lines[0], early, *lines[1:]])))
    assert (error.line, error.field) == (3, "line")
    assert "only the footer may follow" in str(error)


def test_a_line_without_end_is_refused(save, whole, monkeypatch):
    monkeypatch.setattr("phaseloop.runtime.trace.LINE_BYTES_MAX", 2000)
    header = whole[: whole.index(b"\n") + 1]
    error = refused(save(header + b"x" * 5000))
    assert (error.line, "longer than 2000 bytes" in str(error)) == (2, True)


def test_numbers_no_machine_holds_do_not_break_the_digests(save):
    out = BytesIO()
    world = BareWorld(ScriptedEngine(), out=out)
    world.clock.post(RequestCancelled(at_ns=0, request_id=1))
    run_virtual(world.stepper, world.clock)
    world.stepper.close("end", 0)
    huge = out.getvalue().replace(b'"request_id":1', b'"request_id":' + b"9" * 40)
    assert not verify(save(huge))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        open_trace(tmp_path / "nowhere.jsonl")


def test_a_refused_file_is_closed_again(save):
    refused(save(b""))
    gc.collect()  # an open file would be reported as a ResourceWarning, which is an error here
