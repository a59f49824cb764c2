"""Goal: `phaseloop replay` verifies, shows and explains as its help says, with the right code.

Method: the command is run in process on small traces that are written here; what it prints and
returns is compared.
"""

import io
import os
import pty
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path

import pytest
from replay_runs import Ran, edit, record

from phaseloop.cli import replay, replay_files
from phaseloop.cli.main import main
from phaseloop.cli.replay_play import POLL_S, paced, play
from phaseloop.runtime.trace import open_trace
from phaseloop.sim.replay import Fold


class Screen(io.StringIO):
    """A terminal that can be read afterwards."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return record(tmp_path / "t.jsonl")


# --- verify ---------------------------------------------------------------------------------------


def test_a_summary_on_one_screen(trace: Path, capsys: pytest.CaptureFixture[str]):
    ran = Ran(capsys, trace)
    assert ran.code == 0 and ran.err == ""
    lines = ran.out.splitlines()
    assert len(lines) < 25 and max(map(len, lines)) < 200
    assert lines[0] == f"{trace}: barrier-fair on tests, seed 0, 2 slots"
    assert "events/s" in lines[1]
    assert "  requests   4: 3 length, 1 cancelled" in lines
    assert any(line.startswith("  phases     ") and "prefill" in line for line in lines)
    assert any(line.startswith("  worst gap  20.0 ms") for line in lines)
    assert any(line.startswith("  worst wait ") and "request 2" in line for line in lines)
    assert lines[-1] == "chain equal: the reducer decides as it did"


def test_the_summary_as_an_object(trace: Path, capsys: pytest.CaptureFixture[str]):
    found = Ran(capsys, trace, "--json", "--stats").object()
    assert found["exit_code"] == 0 and found["divergence"] is None and found["same_sources"]
    assert found["outcomes"] == {"length": 3, "cancelled": 1, "unfinished": 0}
    assert found["requests"] == 4 and found["events"] == found["footer"]["events"]
    assert found["stats"]["events"] == found["events"] and found["stats"]["ttft_s"]["max"] > 0
    assert found["worst_gap"]["length_s"] == 0.02


def test_statistics(trace: Path, capsys: pytest.CaptureFixture[str]):
    ran = Ran(capsys, trace, "--stats")
    assert ran.code == 0
    rows = [line.split() for line in ran.out.splitlines()]
    assert ["seconds", "p50", "p95", "p99", "max"] in rows
    assert ["barrier", "wait", "0.000", "0.066", "0.066", "0.066"] in rows
    assert {"ttft", "gap", "queue", "prefill", "occupancy"} <= {row[0] for row in rows}


def test_diverged_with_the_same_sources_is_1(trace: Path, capsys: pytest.CaptureFixture[str]):
    ran = Ran(capsys, edit(trace, 5, '"prompt_length":20', '"prompt_length":21'))
    assert ran.code == 1
    assert "DIVERGED at line 5, event 3, 0.050000 s" in ran.out
    assert "event: request 2 arrives (completion, prompt 21, limit 50)" in ran.out
    assert "this line was edited" in ran.out and "the reducer now answers:" in ran.out
    found = Ran(capsys, trace, "--json").object()["divergence"]
    assert found["line"] == 5 and found["what"] == "effects"


def test_diverged_with_other_sources_is_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = record(tmp_path / "t.jsonl", core="0" * 16, version="0.0.9")
    ran = Ran(capsys, path)
    assert ran.code == 0, "the chain is equal"
    assert "note: the sources of phaseloop.core are not those that wrote this trace" in ran.out
    ran = Ran(capsys, edit(path, 5, '"prompt_length":20', '"prompt_length":21'))
    assert ran.code == 3
    assert "the sources have changed: written by 0000000000000000 (version 0.0.9), now" in ran.out


def test_force_goes_on_past_a_divergence(trace: Path, capsys: pytest.CaptureFixture[str]):
    whole = Ran(capsys, trace, "--json").object()["events"]
    edit(trace, 5, '"prompt_length":20', '"prompt_length":21')
    assert Ran(capsys, trace, "--json").object()["tokens"] == 0
    forced = Ran(capsys, trace, "--json", "--force")
    assert forced.code == 1 and forced.object()["events"] == whole
    assert forced.object()["tokens"] > 10 and forced.object()["differing"] >= 1


def test_a_torn_line_is_a_warning(trace: Path, capsys: pytest.CaptureFixture[str]):
    trace.write_bytes(trace.read_bytes()[:-9])
    ran = Ran(capsys, trace)
    assert ran.code == 0 and "warning: line" in ran.out and "is torn" in ran.out


@pytest.mark.parametrize("option", ["--twice", "--check"])
def test_careful_modes_find_nothing_here(
    trace: Path, capsys: pytest.CaptureFixture[str], option: str
):
    assert Ran(capsys, trace, option).code == 0


def test_unreadable_is_2_and_names_line_and_field(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    ran = Ran(capsys, tmp_path / "nothing.jsonl")
    assert ran.code == 2 and "No such file or directory" in ran.err
    ran = Ran(capsys, tmp_path)
    assert ran.code == 2 and "directory" in ran.err.lower()
    ran = Ran(capsys, edit(trace, 4, '"seq":2', '"seq":3'))
    assert ran.code == 2
    assert ran.err.startswith(f"phaseloop: {trace}, line 4, field seq: out of order")
    assert ran.out == ""


def test_a_counts_trace_has_nothing_for_a_model(trace: Path, capsys: pytest.CaptureFixture[str]):
    ran = Ran(capsys, trace, "--engine")
    assert ran.code == 2 and "holds counts, no token ids" in ran.err


# --- places and views -----------------------------------------------------------------------------


def test_until_ends_the_replay(trace: Path, capsys: pytest.CaptureFixture[str]):
    assert Ran(capsys, trace, "--until", "4", "--json").object()["events"] == 5
    assert Ran(capsys, trace, "--until", "req:2", "--json").object()["events"] == 4
    timed = Ran(capsys, trace, "--until", "0.1s", "--json").object()
    assert timed["recorded_s"] <= 0.1 and timed["events"] > 4
    assert "up to the place asked for" in Ran(capsys, trace, "--until", "100ms").out


def test_what_does_not_replay_is_said_before_the_place(
    trace: Path, capsys: pytest.CaptureFixture[str]
):
    edit(trace, 9, '"duration_ns":', '"duration_ns":1')
    ran = Ran(capsys, trace, "--until", "20")
    assert ran.code == 1 and "DIVERGED at line 9" in ran.out


def test_places_that_are_none(trace: Path, capsys: pytest.CaptureFixture[str]):
    for place, message in (
        ("9999", "does not get to event 9999"),
        ("req:77", "does not get to request 77"),
        ("soon", "'soon' is not SEQ, TIME such as 12.5s, or req:ID"),
    ):
        ran = Ran(capsys, trace, "--until", place)
        assert ran.code == 2 and message in ran.err


def test_show(trace: Path, capsys: pytest.CaptureFixture[str]):
    ran = Ran(capsys, trace, "--until", "100ms", "--show", "state")
    assert ran.code == 0
    assert ran.out.splitlines() == [
        "phase prefill for 100.0 ms, 2 rounds in it",
        "policy barrier-fair",
        "cohort 1, sealed",
        "round 1 in flight, prefill: slot 1 request 1 34..98",
        "slot 0  request 0 ready, 30 tokens held, prompt 30, 0 produced of 6",
        "slot 1  request 1 prefilling, 34 tokens held, prompt 100, 0 produced of 6",
        "queue: 2 requests",
        "pages: 62 of 64 free",
    ]
    ran = Ran(capsys, trace, "--until", "100ms", "--show", "queue")
    assert ran.out.splitlines() == [
        "2 requests queued, first in line first",
        "request 2 (completion, prompt 20, limit 50), waits 50.0 ms",
        "request 3 (completion, prompt 40, limit 9), waits 40.0 ms",
    ]
    ran = Ran(capsys, trace, "--until", "100ms", "--show", "kv")
    assert ran.out.splitlines()[0] == "64 pages of 256 tokens: 2 reserved, 0 idle cache, 62 free"
    ran = Ran(capsys, trace, "--until", "100ms", "--show", "req:0")
    assert "request 0 is ready in slot 0, barrier:" in ran.out and "held by request 1" in ran.out
    assert "gone, or never was" in Ran(capsys, trace, "--show", "req:0").out
    for view in ("--show", "--why"):
        ran = Ran(capsys, trace, "--until", "0", view, "req:2")
        assert (ran.code, ran.out) == (2, ""), "both views agree"
        assert ran.err == "phaseloop: request 2 does not occur up to there\n"
    assert Ran(capsys, trace, "--show", "everything").code == 2
    assert Ran(capsys, trace, "--show", "kv", "--json").object()["show"]


def test_why(trace: Path, capsys: pytest.CaptureFixture[str]):
    ran = Ran(capsys, trace, "--why", "req:2")
    assert ran.code == 0 and ran.out.startswith("request 2: completion, prompt 20, limit 50\n")
    assert "cohort_generates" in ran.out and "ends: cancelled" in ran.out
    assert Ran(capsys, trace, "--why", "2").out == ran.out
    part = Ran(capsys, trace, "--why", "req:2", "--until", "100ms")
    assert "not ended here" in part.out
    story = Ran(capsys, trace, "--why", "req:2", "--json").object()["why"]
    assert story["outcome"] == "cancelled" and story["spans"][0]["reason"] == "no_slot"
    ran = Ran(capsys, trace, "--why", "req:99")
    assert ran.code == 2 and "request 99 does not occur" in ran.err


def test_a_view_of_what_does_not_replay_says_so(trace: Path, capsys: pytest.CaptureFixture[str]):
    edit(trace, 9, '"duration_ns":', '"duration_ns":1')
    ran = Ran(capsys, trace, "--show", "state")
    assert ran.code == 1 and "DIVERGED at line 9" in ran.out


# --- by hand --------------------------------------------------------------------------------------


def by_hand(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    commands: str,
    *arguments: object,
) -> Ran:
    monkeypatch.setattr(sys, "stdin", io.StringIO(commands))
    return Ran(capsys, *arguments)


def test_step(trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    ran = by_hand(monkeypatch, capsys, "n\n\nb\nn 2\nq\nn\n", trace, "--step")
    assert ran.code == 0
    places = [line.split(":")[0] for line in ran.out.splitlines() if not line.startswith("  ")]
    assert places == [
        "before the first event",
        "event 0, line 2, 0.000000 s",
        "event 1, line 3, 0.000000 s",
        "event 0, line 2, 0.000000 s",
        "event 2, line 4, 0.000000 s",
    ]
    assert "  phase idle -> prefill" in ran.out and "  -> seat request 0 in slot 0" in ran.out


def test_back(trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    last = Ran(capsys, trace, "--json").object()["events"] - 1
    ran = by_hand(monkeypatch, capsys, "b\nn\nn\n", trace, "--back")
    assert ran.code == 0
    places = [line.split(",")[0] for line in ran.out.splitlines() if not line.startswith("  ")]
    assert places == [
        f"event {last}",
        f"event {last - 1}",
        f"event {last}",
        f"event {last}",
        "the end",
    ]
    ran = by_hand(monkeypatch, capsys, "b\nb\n", trace, "--back", "--until", "0")
    assert ran.out.splitlines()[-1] == "this is the beginning"


def test_jumps_and_views_by_hand(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    commands = "j 100ms\ns\nu\nk\nr 0\nw 0\nj req:2\nj 99999\nj x\nz\n?\nw 3\nb 99\nw 0\n"
    ran = by_hand(monkeypatch, capsys, commands, trace, "--step")
    assert ran.code == 0
    for text in (
        "cohort 1, sealed",
        "2 requests queued",
        "64 pages of 256 tokens",
        "request 0 is ready in slot 0",
        "not ended here",
        "request 2 arrives",
        "there is no event 99999",
        "'x' is not SEQ",
        "'z' is no command",
        "why request ID waited",
        "request 3 has not arrived yet",
        "before the first event",
        "request 0 has not arrived yet",
    ):
        assert text in ran.out, text


def test_stepping_ends_at_what_is_wrong(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    edit(trace, 9, '"duration_ns":', '"duration_ns":1')
    ran = by_hand(monkeypatch, capsys, "n 99\n", trace, "--step")
    assert ran.code == 1 and "the end: the replay diverges at line 9" in ran.out
    assert "DIVERGED at line 9" in ran.out
    ran = by_hand(monkeypatch, capsys, "n 99\n", trace, "--step", "--force")
    assert ran.code == 1 and "diverges" not in ran.out.splitlines()[3]
    edit(trace, 9, '"seq":7', '"seq":8')
    ran = by_hand(monkeypatch, capsys, "n 99\n", trace, "--step")
    assert ran.code == 2 and "line 9, field seq" in ran.err


def test_keys_in_a_terminal(trace: Path):
    """A key needs no enter; what needs a word asks for it."""
    controller, terminal = pty.openpty()
    command = [sys.executable, "-m", "phaseloop", "replay", str(trace), "--step"]
    with subprocess.Popen(command, stdin=terminal, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            shown = ""
            for keys, awaited in ((b"nnbj", "to: "), (b"64ms\n", "event 5"), (b"q", None)):
                os.write(controller, keys)
                while awaited is not None and awaited not in shown:
                    shown += process.stdout.read(1)
            shown += process.stdout.read()
            assert process.wait() == 0
        finally:
            process.kill()
            os.close(controller)
            os.close(terminal)
    places = [line.partition(", line")[0] for line in shown.splitlines() if ", line" in line]
    assert places == ["event 0", "event 1", "event 0", "to: event 5"]


# --- as it happens --------------------------------------------------------------------------------


def test_played_at_a_speed(trace: Path, capsys: pytest.CaptureFixture[str]):
    events = Ran(capsys, trace, "--json").object()["events"]
    ran = Ran(capsys, trace, "--speed", "1e9")
    assert ran.code == 0
    assert sum(line.startswith("event ") for line in ran.out.splitlines()) == events
    ran = Ran(capsys, trace, "--speed", "1e9", "--until", "req:2")
    assert sum(line.startswith("event ") for line in ran.out.splitlines()) == 4
    ran = Ran(capsys, trace, "--speed", "0")
    assert ran.code == 2 and "must be more than 0" in ran.err


def test_the_pace_is_the_recorded_one(trace: Path):
    with open_trace(trace) as reader:
        steps = list(Fold(reader))
    slept: list[float] = []
    assert list(paced(iter(steps), 2.0, slept.append)) == steps
    assert sum(slept) == pytest.approx(steps[-1].event.at_ns / 1e9 / 2)
    assert all(length > 0 for length in slept)


def test_followed_while_it_grows(trace: Path, capsys: pytest.CaptureFixture[str]):
    """Half lines appear while somebody waits for them; the footer ends it."""
    content = trace.read_bytes()
    pieces = [content[start : start + 97] for start in range(0, len(content), 97)]
    trace.write_bytes(pieces.pop(0))

    def write_more(seconds: float) -> None:
        assert seconds == POLL_S
        with trace.open("ab") as out:
            out.write(pieces.pop(0))

    parser = ArgumentParser()
    replay.add_arguments(parser)
    assert play(parser.parse_args([str(trace), "--follow"]), write_more) == 0
    assert not pieces
    shown = capsys.readouterr().out
    assert shown == Ran(capsys, trace, "--speed", "1e9").out


def test_played_in_a_terminal(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    assert main(["replay", str(trace), "--speed", "1e9"]) == 0
    assert "slot 0  free" in screen.getvalue() and "cohort 2" in screen.getvalue()


# --- the rest -------------------------------------------------------------------------------------


def test_a_bar_for_long_traces_in_a_terminal(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    assert Ran(capsys, trace).err == ""
    monkeypatch.setattr(replay_files, "PROGRESS_BYTES_MIN", 0)
    assert Ran(capsys, trace).err == "", "no terminal, no bar"

    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    assert main(["replay", str(trace)]) == 0
    assert "replay" in screen.getvalue() and "%" in screen.getvalue()


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]):
    ran = Ran(capsys, "--help")
    assert ran.code == 0
    options = (
        "until step back speed follow show why stats csv perfetto redact diff what-if inject "
        "shrink engine predicate tries cost out force twice check json"
    )
    for option in options.split():
        assert f"--{option}" in ran.out
    assert "Exit codes: 0 equal" in ran.out
