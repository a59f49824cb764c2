"""Goal: a fold finds exactly what was changed, in the trace or in the reducer.

Method: small traces are recorded, then a line is edited, the reducer is replaced, or the file is
cut; the verdict must name the place.
"""

from itertools import pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace
from recordings import BUSY, crowd, edit, record

import phaseloop.sim.replay as replay
from phaseloop.core.invariants import Violation
from phaseloop.core.reduce import reduce
from phaseloop.core.state import State
from phaseloop.core.vocabulary import AnyEvent, Effects, LaunchRound, RequestCancelled
from phaseloop.runtime.trace import TraceError, open_trace
from phaseloop.sim.replay import Fold, Step, Verdict


def fold(path: Path, **options: bool) -> tuple[Verdict, list[Step]]:
    with open_trace(path) as reader:
        run = Fold(reader, **options)
        steps = list(run)
        return run.verdict(), steps


def test_an_untouched_trace_is_equal(tmp_path: Path):
    verdict, steps = fold(record(tmp_path / "t.jsonl"))
    assert verdict.exit_code == 0 and verdict.divergence is None
    assert verdict.events == len(steps) == steps[-1].seq + 1
    assert verdict.footer is not None and verdict.footer.reason == "done"
    assert all(one.after is two.before for one, two in pairwise(steps))
    assert [step.line for step in steps[:3]] == [2, 3, 4]


def test_an_edited_event_is_named_with_the_part_of_the_state(tmp_path: Path):
    path = record(tmp_path / "t.jsonl", crowd(80, spacing_ms=10))
    lines = path.read_text().splitlines()
    number = next(i for i, line in enumerate(lines, 1) if '"request_id":70,' in line)
    edit(path, number, '"prompt_length":10', '"prompt_length":11')
    verdict, steps = fold(path)
    assert verdict.exit_code == 1
    found = verdict.divergence
    assert found is not None and found.what == "effects" and found.line == number
    assert found.seq == len(steps), "nothing is shown of what does not replay"
    assert found.subtrees == ("queue",), "it still waits at the checkpoint"
    forced, all_steps = fold(path, force=True)
    assert forced.differing > 1 and len(all_steps) > len(steps)


def test_an_edit_that_leads_nowhere_differs_once(tmp_path: Path):
    path = record(tmp_path / "t.jsonl", crowd(60))
    lines = path.read_text().splitlines()
    number = next(i for i, line in enumerate(lines, 1) if '"duration_ns":20000000' in line)
    edit(path, number, '"duration_ns":20000000', '"duration_ns":20000001')
    verdict, _ = fold(path, force=True)
    assert verdict.differing == 1 and verdict.divergence is not None
    assert verdict.divergence.subtrees == ()


def test_an_edited_header_shows_at_the_first_event(tmp_path: Path):
    path = edit(record(tmp_path / "t.jsonl"), 1, '"seed":0', '"seed":1')
    verdict, _ = fold(path)
    assert verdict.divergence is not None and verdict.divergence.seq == 0


def test_an_edited_checkpoint_names_its_subtree(tmp_path: Path):
    path = record(tmp_path / "t.jsonl", crowd(60))
    lines = path.read_text().splitlines()
    number = next(i for i, line in enumerate(lines, 1) if line.startswith('{"line":"checkpoint"'))
    digest = lines[number - 1].partition('"kv":"')[2][:16]
    edit(path, number, digest, "0" * 16)
    verdict, _ = fold(path)
    found = verdict.divergence
    assert verdict.exit_code == 1 and found is not None
    assert (found.what, found.line, found.subtrees) == ("state", number, ("kv",))


def test_without_a_checkpoint_after_it_no_subtree_is_named(tmp_path: Path):
    path = record(tmp_path / "t.jsonl")
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:10]))
    edit(path, 8, '"duration_ns":', '"duration_ns":1')
    verdict, _ = fold(path)
    assert verdict.divergence is not None and verdict.divergence.subtrees is None


def test_other_sources_exit_3_where_they_decide_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = record(tmp_path / "t.jsonl", core="0" * 16)
    verdict, _ = fold(path)
    assert verdict.exit_code == 0 and not verdict.same_sources

    def stubborn(state: State, event: AnyEvent) -> tuple[State, Effects]:
        """A reducer that does not listen to cancels."""
        return (state, ()) if isinstance(event, RequestCancelled) else reduce(state, event)

    monkeypatch.setattr(replay, "reduce", stubborn)
    verdict, _ = fold(path)
    assert verdict.exit_code == 3 and verdict.divergence is not None
    assert isinstance(verdict.divergence.event, RequestCancelled)
    assert verdict.divergence.effects == ()


def test_other_sources_with_equal_decisions_are_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A field of the state that no decision shows: digests differ, the chain does not."""
    path = record(tmp_path / "t.jsonl", core="0" * 16)

    def renumbering(state: State, event: AnyEvent) -> tuple[State, Effects]:
        after, effects = reduce(state, event)
        return replace(after, ticket_next=after.ticket_next + 1), effects

    monkeypatch.setattr(replay, "reduce", renumbering)
    verdict, _ = fold(path)
    assert verdict.exit_code == 0 and "phase" in verdict.state_notes[0]


def test_a_torn_last_line_is_dropped(tmp_path: Path):
    path = record(tmp_path / "t.jsonl")
    content = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(content[:7]) + content[7][:20])
    verdict, steps = fold(path)
    assert verdict.exit_code == 0 and verdict.torn_line == 8 and len(steps) == 6
    assert verdict.footer is None


def test_a_fault_that_was_recorded_is_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The loop records the event that broke the reducer as one without effect, then ends."""

    def fragile(state: State, event: AnyEvent) -> tuple[State, Effects]:
        if isinstance(event, RequestCancelled):
            raise AssertionError("broken on purpose")
        return reduce(state, event)

    path = record(tmp_path / "t.jsonl", core="0" * 16)
    monkeypatch.setattr(replay, "reduce", fragile)
    verdict, _ = fold(path)
    assert verdict.exit_code == 3 and verdict.divergence is not None
    assert verdict.divergence.detail == "AssertionError: broken on purpose"

    last = replace(BUSY, inputs=(*BUSY.inputs[:-1], BUSY.inputs[-1]))
    monkeypatch.setattr("phaseloop.sim.replay_rerun.reduce", lambda s, e: replay.attempt(s, e)[:2])
    verdict, steps = fold(record(tmp_path / "f.jsonl", last))
    assert verdict.exit_code == 0 and verdict.fault is not None
    assert "broken on purpose" in verdict.fault
    cancelled = next(s for s in steps if isinstance(s.event, RequestCancelled))
    assert cancelled.before is cancelled.after and not cancelled.effects


def test_twice_finds_an_impure_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = record(tmp_path / "t.jsonl")
    assert fold(path, twice=True)[0].exit_code == 0
    calls: list[int] = []

    def moody(state: State, event: AnyEvent) -> tuple[State, Effects]:
        calls.append(1)
        after, effects = reduce(state, event)
        return (after, effects) if len(calls) != 12 else (after, ())

    monkeypatch.setattr(replay, "reduce", moody)
    verdict, _ = fold(path, twice=True)
    assert verdict.exit_code == 1 and verdict.divergence is not None
    assert verdict.divergence.what == "impure" and verdict.divergence.seq == 5


def test_check_finds_a_broken_invariant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = record(tmp_path / "t.jsonl")
    assert fold(path, check=True)[0].exit_code == 0

    def picky(before: State, event: AnyEvent, after: State, effects: Effects) -> None:
        if any(isinstance(e, LaunchRound) and e.kind == "decode" for e in effects):
            raise Violation("I4", "no decoding at all")

    monkeypatch.setattr(replay, "check_step", picky)
    verdict, _ = fold(path, check=True)
    assert verdict.exit_code == 1 and verdict.divergence is not None
    assert verdict.divergence.what == "invariant" and "I4" in verdict.divergence.detail


@pytest.mark.parametrize("name", sorted(replay.LIMIT_RANGES))
def test_limits_out_of_range_are_refused_by_name(tmp_path: Path, name: str):
    path = record(tmp_path / "t.jsonl")
    low, high = replay.LIMIT_RANGES[name]
    for value in (low - 1, high + 1):
        header = path.read_text().splitlines()[0]
        before, _, rest = header.partition(f'"{name}":')
        number = rest[: min(i for i, c in enumerate(rest) if c in ",}")]
        bad = f'{before}"{name}":{value}{rest[len(number) :]}\n'
        (tmp_path / "bad.jsonl").write_text(bad)
        with pytest.raises(TraceError, match=rf"line 1, field limits\.{name}: {value} is not in"):
            fold(tmp_path / "bad.jsonl")
