"""Goal: of two traces, the first event or decision that differs, and the parts of the state behind.

Method: pairs of runs that differ in one known place.
"""

from pathlib import Path

from msgspec.structs import replace
from recordings import BUSY, LIMITS, call, crowd, edit, record, scenario_of

from phaseloop.core.vocabulary import Request
from phaseloop.runtime.trace import open_trace
from phaseloop.sim.replay import Fold
from phaseloop.sim.replay_diff import (
    Difference,
    difference_lines,
    first_difference,
    header_lines,
)


def compare(one: Path, two: Path) -> tuple[Difference | None, list[str]]:
    with open_trace(one) as left, open_trace(two) as right:
        found = first_difference(Fold(left, force=True), Fold(right, force=True))
        return found, header_lines(left.header, right.header)


def test_equal_traces_do_not_differ(tmp_path: Path):
    one, two = record(tmp_path / "1.jsonl"), record(tmp_path / "2.jsonl", seed=3)
    found, headers = compare(one, two)
    assert found is None and headers == ["header seed 0, other 3"]


def test_another_event(tmp_path: Path):
    one = record(tmp_path / "1.jsonl")
    two = edit(record(tmp_path / "2.jsonl"), 5, '"prompt_length":20', '"prompt_length":21')
    found, _ = compare(one, two)
    assert found is not None and found.left is not None and found.right is not None
    assert found.left.line == found.right.line == 5 and not found.same_event
    lines = difference_lines(found)
    assert "prompt 20" in lines[0] and "prompt 21" in lines[1]
    assert lines[2] == "the states before it are equal"


def test_another_decision(tmp_path: Path):
    """The same calls and times under another policy: the first launch differs."""
    prompts = call(0, *(Request(i, 60, output_limit=2) for i in range(2)))
    one = record(tmp_path / "1.jsonl", scenario_of(prompts, policy="barrier-fair"))
    two = record(tmp_path / "2.jsonl", scenario_of(prompts, policy="barrier-greedy"))
    found, headers = compare(one, two)
    assert headers == [
        "header policy.name 'barrier-fair', other 'barrier-greedy'",
        "header policy.share 'fair', other 'greedy'",
    ]
    assert found is not None and found.same_event
    text = "\n".join(difference_lines(found))
    assert "request 0 0..32" in text and "request 0 0..60" in text
    assert "phase: flight.lanes[0].count 32, other 60" in text


def test_another_queue_and_another_ledger(tmp_path: Path):
    one = record(tmp_path / "1.jsonl")
    two = record(tmp_path / "2.jsonl", replace(BUSY, limits=replace(LIMITS, page_count=50)))
    found, headers = compare(one, two)
    assert headers == ["header limits.page_count 64, other 50"]
    assert found is None, "memory is ample in both: no decision depends on it"
    short = replace(BUSY, limits=replace(LIMITS, page_count=1))
    found, _ = compare(one, record(tmp_path / "3.jsonl", short))
    assert found is not None and found.same_event
    text = "\n".join(difference_lines(found))
    assert "kv: pages_free" in text and "queue: request 1" in text and "slots: slots[1]" in text


def test_one_that_ends_earlier(tmp_path: Path):
    one = record(tmp_path / "1.jsonl", crowd(20))
    two = tmp_path / "2.jsonl"
    two.write_text("".join(one.read_text().splitlines(keepends=True)[:12]))
    found, _ = compare(one, two)
    assert found is not None and found.left is not None and found.right is None
    assert found.left.seq == 11 and difference_lines(found)[1] == "other  has no more events"


def test_long_differences_are_cut(tmp_path: Path):
    limits = replace(LIMITS, slot_count=64)
    calls = call(0, *(Request(i, 60, output_limit=2) for i in range(64)))
    one = record(tmp_path / "1.jsonl", scenario_of(calls, limits=limits))
    two = record(tmp_path / "2.jsonl", scenario_of(calls, limits=replace(limits, page_count=63)))
    found, _ = compare(one, two)
    assert found is not None
    lines = difference_lines(found)
    assert any(line.endswith(" more") for line in lines) and len(lines) < 150
    assert max(map(len, lines)) < 600
