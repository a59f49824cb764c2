"""Goal: a cursor shows the same steps whichever way it came, and finds every place by name.

Method: traces longer than several blocks; every step fetched at random, backwards and again is
compared with the one plain fold; places are compared with a search of that fold.
"""

import random
from pathlib import Path

import pytest
from recordings import MS, crowd, edit, record

import phaseloop.sim.replay_cursor as replay_cursor
from phaseloop.runtime.trace import open_trace
from phaseloop.sim.replay import Fold, Step
from phaseloop.sim.replay_cursor import Cursor, Target, TargetError, parse_target, upto


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(replay_cursor, "BLOCK_EVENTS", 50)
    monkeypatch.setattr(replay_cursor, "BLOCKS_KEPT", 2)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return record(tmp_path / "t.jsonl", crowd(80))


@pytest.fixture
def steps(path: Path) -> list[Step]:
    with open_trace(path) as reader:
        return list(Fold(reader))


def test_forwards_backwards_and_at_random_it_is_the_same(path: Path, steps: list[Step]):
    count = len(steps)
    assert count > 6 * 50, "several blocks, so that most are forgotten and folded again"
    draws = random.Random(0)
    order = [*range(count), *reversed(range(count)), *(draws.randrange(count) for _ in range(300))]
    with Cursor(path) as cursor:
        for seq in order:
            assert cursor.step(seq) == steps[seq]
        assert cursor.step(count) is None and cursor.step(-1) is None
        assert cursor.end() == count - 1
        assert cursor.initial == steps[0].before
        assert cursor.verdict().exit_code == 0


def test_the_far_end_first(path: Path, steps: list[Step]):
    with Cursor(path) as cursor:
        assert cursor.step(len(steps) - 1) == steps[-1]
        assert cursor.step(0) == steps[0]


@pytest.mark.parametrize("count", [49, 50, 51, 100])
def test_a_trace_that_ends_at_a_block_s_edge(tmp_path: Path, count: int):
    path = record(tmp_path / "t.jsonl", crowd(80))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[: count + 1]))
    with Cursor(path) as cursor:
        assert cursor.end() == count - 1
        assert cursor.find(Target("time", 10**15)) == count - 1
        assert [cursor.step(seq) is not None for seq in (0, count - 1, count)] == [
            True,
            True,
            False,
        ]


def test_times_are_the_last_event_not_later(path: Path, steps: list[Step]):
    times = sorted({step.event.at_ns for step in steps})
    with Cursor(path) as cursor:
        for at_ns in (*times, *(t - 1 for t in times), *(t + 1 for t in times)):
            expected = max((s.seq for s in steps if s.event.at_ns <= at_ns), default=-1)
            assert cursor.find(Target("time", at_ns)) == expected
            assert len(list(upto(iter(steps), Target("time", at_ns)))) == expected + 1


def test_requests_are_found_where_they_arrive(path: Path, steps: list[Step]):
    with Cursor(path) as cursor:
        seq = cursor.find(Target("request", 40))
        assert steps[seq].after.request_id_last == 40
        assert steps[seq].before.request_id_last == 39
        with pytest.raises(TargetError, match="request 99 does not occur"):
            cursor.find(Target("request", 99))
        with pytest.raises(TargetError, match=rf"no event 9999: .* 0\.\.{len(steps) - 1}"):
            cursor.find(Target("seq", 9999))


def test_a_divergence_is_where_a_cursor_ends_unless_forced(path: Path, steps: list[Step]):
    edit(path, steps[120].line, '"prompt_length":14', '"prompt_length":15')
    with Cursor(path) as cursor:
        assert cursor.step(119) == steps[119] and cursor.step(120) is None
        assert cursor.verdict().divergence is not None
    with Cursor(path, force=True) as cursor:
        assert cursor.step(120) is not None and cursor.step(120) != steps[120]


def test_a_malformed_line_ends_it_too_and_is_kept(path: Path, steps: list[Step]):
    edit(path, steps[120].line, '"seq":120', '"seq":121')
    with Cursor(path) as cursor:
        assert cursor.end() == 119
        assert cursor.broken is not None and cursor.broken.field == "seq"
        assert cursor.step(119) == steps[119]


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("0", Target("seq", 0)),
        ("120", Target("seq", 120)),
        ("12.5s", Target("time", 12_500 * MS)),
        ("300ms", Target("time", 300 * MS)),
        (".5s", Target("time", 500 * MS)),
        ("7us", Target("time", 7_000)),
        ("8ns", Target("time", 8)),
        ("req:3", Target("request", 3)),
    ],
)
def test_places(text: str, target: Target):
    assert parse_target(text) == target


@pytest.mark.parametrize(
    "text",
    ["", "-1", "x", "1.5", "req:", "req:x", "s", "1.2.3s", "1e3s", "٣", "9" * 30, "9" * 30 + "s"],
)
def test_no_places(text: str):
    with pytest.raises(TargetError):
        parse_target(text)
