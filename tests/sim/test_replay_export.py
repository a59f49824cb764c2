"""Goal: exports say what happened: Perfetto's JSON is well formed, the table adds up, redaction
keeps every decision.

Method: scenarios with every kind of end are exported and read back; slices must nest on their
track, asynchronous pairs must match, rows are compared with the steps.
"""

import csv
import io
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from recordings import BUSY, LIMITS, MS, call, cancel, crowd, record, scenario_of, shutdown

from phaseloop.core.policy import PRESETS
from phaseloop.core.vocabulary import (
    ClientResumed,
    ClientStalled,
    EngineLost,
    Request,
    RequestArrived,
)
from phaseloop.runtime.trace import open_trace
from phaseloop.sim.replay import Fold, Step
from phaseloop.sim.replay_export import Redactor, RequestTable
from phaseloop.sim.replay_perfetto import Perfetto
from phaseloop.sim.replay_scenario import Answer, Scenario

SCENARIOS: dict[str, Scenario] = {
    "busy": BUSY,
    "crowd": crowd(70),
    "children": scenario_of(call(0, Request(0, 40, output_limit=3, choices=2)), cancel(60, 0)),
    "stalled": scenario_of(
        call(0, Request(0, 30, output_limit=20)),
        ClientStalled(at_ns=130 * MS, request_id=0),
        ClientResumed(at_ns=400 * MS, request_id=0),
    ),
    "saved": scenario_of(
        call(0, *(Request(i, 400) for i in range(3))),
        limits=replace(LIMITS, page_count=6, can_save=True, output_reserve=64, slot_count=3),
        answers=tuple(Answer(i, tokens=300) for i in range(3)),
    ),
    "refused": scenario_of(call(0, Request(0, 9999)), call(1, Request(1, 8, output_limit=1))),
    "lost": scenario_of(
        call(0, Request(0, 30, output_limit=90), Request(1, 40, output_limit=90)),
        call(5, Request(2, 30)),
        EngineLost(at_ns=300 * MS, reason="device 0: /dev/secret is gone"),
    ),
    "shut": scenario_of(call(0, Request(0, 30, output_limit=4000)), shutdown(100)),
    "failed": scenario_of(
        call(0, Request(0, 30, output_limit=9), Request(1, 90, output_limit=9)),
        answers=(Answer(1, fails_at=70),),
    ),
    "embedding": scenario_of(
        call(0, Request(0, 80, kind="embedding"), Request(1, 9, output_limit=0))
    ),
}
SCENARIOS |= {f"busy {name}": replace(BUSY, policy=PRESETS[name]) for name in PRESETS}
scenarios = pytest.mark.parametrize("name", sorted(SCENARIOS))


def steps_of(path: Path) -> list[Step]:
    with open_trace(path) as reader:
        fold = Fold(reader)
        steps = list(fold)
        assert fold.verdict().exit_code == 0
        return steps


def perfetto(steps: list[Step]) -> list[dict[str, Any]]:
    out = io.BytesIO()
    writer = Perfetto(out, steps[0].before)
    for step in steps:
        writer.see(step)
    writer.close()
    return json.loads(out.getvalue())["traceEvents"]


@scenarios
def test_slices_nest_on_their_track(tmp_path: Path, name: str):
    steps = steps_of(record(tmp_path / "t.jsonl", SCENARIOS[name]))
    tracks: defaultdict[Any, list[tuple[int, int]]] = defaultdict(list)
    for event in perfetto(steps):
        if event["ph"] == "X":
            since_ns = round(event["ts"] * 1000)
            span = since_ns, since_ns + round(event["dur"] * 1000)
            tracks[event["pid"], event["tid"]].append(span)
    for spans in tracks.values():
        end_ns = 0
        for since_ns, until_ns in sorted(spans):
            assert since_ns >= end_ns, "these tracks hold one thing after another"
            end_ns = until_ns
    last_ns = steps[-1].event.at_ns
    engine = [span for tid in (2, 3, 4, 5) for span in tracks[1, tid]]
    assert sum(b - a for a, b in engine) == last_ns, "the engine is busy or idle, never neither"
    assert sum(b - a for a, b in tracks[1, 1]) == last_ns, "there is a phase at any time"


@scenarios
def test_asynchronous_pairs_match(tmp_path: Path, name: str):
    steps = steps_of(record(tmp_path / "t.jsonl", SCENARIOS[name]))
    stacks: defaultdict[str, list[tuple[str, float]]] = defaultdict(list)
    seen: set[str] = set()
    for event in perfetto(steps):
        if event["ph"] == "b":
            stacks[event["id"]].append((event["name"], event["ts"]))
            seen.add(event["name"])
        elif event["ph"] == "e":
            begun, ts = stacks[event["id"]].pop()
            assert begun == event["name"] and ts <= event["ts"]
    assert not any(stacks.values()), "whatever begins ends"
    arrived = {
        f"request {request.request_id}"
        for step in steps
        if isinstance(step.event, RequestArrived)
        for request in step.event.requests
    }
    assert arrived <= seen


@scenarios
def test_rounds_arrows_and_names(tmp_path: Path, name: str):
    steps = steps_of(record(tmp_path / "t.jsonl", SCENARIOS[name]))
    events = perfetto(steps)
    rounds = [e["args"]["round"] for e in events if e["ph"] == "X" and "round" in e.get("args", {})]
    assert sorted(rounds) == list(range(len(rounds))), "each round once"
    starts = {e["id"] for e in events if e["ph"] == "s"}
    assert {e["id"] for e in events if e["ph"] == "f"} <= starts
    named = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M"}
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] in "Xi"} <= named
    assert {e["name"] for e in events if e["ph"] == "C"} == {"queue", "KV pages", "round"}


def test_stages_of_a_saved_and_of_a_stalled_sequence(tmp_path: Path):
    for name, stage in (("saved", "saved"), ("stalled", "stalled"), ("children", "following")):
        steps = steps_of(record(tmp_path / "t.jsonl", SCENARIOS[name]))
        assert stage in {event["name"] for event in perfetto(steps) if event["ph"] == "b"}


def table(path: Path) -> list[dict[str, str]]:
    out = io.StringIO()
    writer = RequestTable(out)
    for step in steps_of(path):
        writer.see(step)
    writer.close()
    return list(csv.DictReader(io.StringIO(out.getvalue())))


def test_the_table_of_the_busy_scenario(tmp_path: Path):
    rows = {row["request_id"]: row for row in table(record(tmp_path / "t.jsonl"))}
    first = rows["0"]
    assert first["arrived_s"] == "0.000000000" and first["seated_s"] == "0.000000000"
    assert first["ready_s"] == "0.064000000" and first["first_token_s"] == "0.140000000"
    assert first["ended_s"] == "0.240000000" and first["outcome"] == "length"
    assert first["tokens"] == "6" and first["gap_max_s"] == "0.020000000"
    assert rows["2"]["outcome"] == "cancelled" and rows["2"]["ended_s"] == "0.500000000"
    assert rows["3"]["outcome"] == "stop" and rows["3"]["tokens"] == "4"


@scenarios
def test_a_row_for_each_request_in_order_of_its_times(tmp_path: Path, name: str):
    path = record(tmp_path / "t.jsonl", SCENARIOS[name])
    rows = table(path)
    arrived = [
        request.request_id
        for step in steps_of(path)
        if isinstance(step.event, RequestArrived)
        for request in step.event.requests
    ]
    assert sorted(int(row["request_id"]) for row in rows) == arrived
    for row in rows:
        columns = ("arrived_s", "seated_s", "ready_s", "first_token_s", "ended_s")
        times = [float(row[column]) for column in columns if row[column]]
        assert times == sorted(times), row
        assert (row["first_token_s"] == "") == (row["tokens"] == "0")


def test_unfinished_requests_have_a_row(tmp_path: Path):
    path = record(tmp_path / "t.jsonl")
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:6]))
    assert {row["outcome"] for row in table(path)} == {"unfinished"}


def redact(path: Path, out: Path) -> dict[str, int]:
    with open_trace(path) as reader, out.open("wb") as target:
        fold = Fold(reader)
        writer = Redactor(target, reader.header, fold.state)
        for step in fold:
            writer.see(step)
        writer.close(reader.footer)
    return writer.dropped


@scenarios
def test_redaction_keeps_every_decision(tmp_path: Path, name: str):
    path = record(tmp_path / "t.jsonl", SCENARIOS[name], model="a" * 16, seed=7)
    out = tmp_path / "r.jsonl"
    dropped = redact(path, out)
    assert {"model digest", "seed"} <= set(dropped)
    one, two = steps_of(path), steps_of(out)
    assert [s.effects for s in one] == [s.effects for s in two]
    assert [s.after for s in one] == [s.after for s in two]


def test_redaction_drops_the_engine_s_words(tmp_path: Path):
    path = record(tmp_path / "t.jsonl", SCENARIOS["lost"])
    assert "secret" in path.read_text()
    assert redact(path, tmp_path / "r.jsonl") == {"engine error text": 1}
    assert "secret" not in (tmp_path / "r.jsonl").read_text()
    path = record(tmp_path / "t.jsonl", SCENARIOS["failed"])
    assert redact(path, tmp_path / "r.jsonl") == {"engine error text": 1}
    assert "as recorded" not in (tmp_path / "r.jsonl").read_text()


@scenarios
def test_where_nothing_is_to_be_dropped_the_file_is_the_same(tmp_path: Path, name: str):
    path = record(tmp_path / "t.jsonl", SCENARIOS[name])
    redact(path, tmp_path / "r.jsonl")
    again = tmp_path / "again.jsonl"
    assert redact(tmp_path / "r.jsonl", again) == {}
    assert again.read_bytes() == (tmp_path / "r.jsonl").read_bytes()


def test_a_trace_without_a_footer_stays_one(tmp_path: Path):
    path = record(tmp_path / "t.jsonl")
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:6]))
    redact(path, tmp_path / "r.jsonl")
    assert (tmp_path / "r.jsonl").read_bytes() == path.read_bytes()
