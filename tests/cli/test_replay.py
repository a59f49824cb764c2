"""Goal: every option of `phaseloop replay` does what its help says, with the documented exit code.

Method: the command is run in process on small traces that are written here; what it prints, writes
and returns is compared.
"""

import io
import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from phaseloop import __version__
from phaseloop.cli import replay_files
from phaseloop.cli.main import main
from phaseloop.core.policy import PRESETS
from phaseloop.core.state import Limits, initial
from phaseloop.core.vocabulary import Request, RequestArrived, RequestCancelled
from phaseloop.engine.sim_cost import Cost
from phaseloop.runtime.digest import core_digest
from phaseloop.runtime.trace import Header, TraceWriter
from phaseloop.sim.replay_scenario import Scenario
from phaseloop.sim.replay_whatif import summary_of

MS = 1_000_000
LIMITS = Limits(slot_count=2, batch_tokens=64, context_length=4096, page_count=64)
COST = Cost(prefill_token_ns=MS, decode_round_ns=20 * MS, sample_lane_ns=5 * MS)


def arrival(at_ms: int, *requests: Request) -> RequestArrived:
    return RequestArrived(at_ns=at_ms * MS, requests=requests)


INPUTS = (
    arrival(0, Request(0, 30, output_limit=6), Request(1, 100, output_limit=6)),
    arrival(50, Request(2, 20, output_limit=50)),
    arrival(60, Request(3, 40, output_limit=9)),
    RequestCancelled(at_ns=500 * MS, request_id=2),
)
SCENARIO = Scenario(LIMITS, PRESETS["barrier-fair"], INPUTS, ())


def record(path: Path, scenario: Scenario = SCENARIO, **header: Any) -> Path:
    fields = {"version": __version__, "core": core_digest(), "engine": "tests"} | header
    head = Header(policy=scenario.policy, limits=scenario.limits, **fields)
    with path.open("wb") as out:
        writer = TraceWriter(out, head, initial(scenario.limits, scenario.policy))
        summary_of(scenario, COST, (writer.append,))
        writer.close("done", 0)
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return record(tmp_path / "t.jsonl")


class Ran:
    """One command line, and what came of it."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *arguments: object) -> None:
        capsys.readouterr()
        self.code = main(["replay", *map(str, arguments)])
        self.out, self.err = capsys.readouterr()

    def object(self) -> dict[str, Any]:
        return json.loads(self.out)


def edit(path: Path, line: int, old: str, new: str) -> Path:
    lines = path.read_text().splitlines(keepends=True)
    assert old in lines[line - 1]
    lines[line - 1] = lines[line - 1].replace(old, new, 1)
    path.write_text("".join(lines))
    return path


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
    assert "not arrived yet" in Ran(capsys, trace, "--until", "0", "--show", "req:2").out
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


# --- exports --------------------------------------------------------------------------------------


def test_exports_are_written_in_one_go(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    table, picture, shared = tmp_path / "o.csv", tmp_path / "o.json", tmp_path / "o.jsonl"
    ran = Ran(capsys, trace, "--csv", table, "--perfetto", picture, "--redact", shared)
    assert ran.code == 0
    assert [f"wrote {path}" in ran.out for path in (table, picture, shared)] == [True] * 3
    assert "nothing else to drop either, so the chain is as it was" in ran.out
    assert table.read_text().count("\n") == 5
    assert json.loads(picture.read_text())["traceEvents"]
    assert shared.read_bytes() == trace.read_bytes()


def test_redaction_says_what_it_dropped(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path, out = record(tmp_path / "t.jsonl", model="a" * 16, seed=3), tmp_path / "r.jsonl"
    ran = Ran(capsys, path, "--redact", out)
    assert "dropped: model digest, seed; the chain is a new one, over the same decisions" in ran.out
    assert Ran(capsys, out).code == 0
    ran = Ran(capsys, path, "--diff", out)
    assert ran.code == 0 and "header model" in ran.out


@pytest.mark.parametrize("option", ["--csv", "--perfetto", "--redact"])
def test_the_trace_is_not_overwritten(trace: Path, capsys: pytest.CaptureFixture[str], option: str):
    before = trace.read_bytes()
    ran = Ran(capsys, trace, option, trace.parent / "." / trace.name)
    assert ran.code == 2 and "is the trace itself" in ran.err
    assert trace.read_bytes() == before
    ran = Ran(capsys, trace, option, trace.parent / "no" / "such" / "place")
    assert ran.code == 2 and "No such file" in ran.err


# --- comparisons and changes ----------------------------------------------------------------------


def test_diff(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    same = record(tmp_path / "same.jsonl")
    ran = Ran(capsys, trace, "--diff", same)
    assert ran.code == 0 and "the same" in ran.out
    other = record(tmp_path / "o.jsonl", replace(SCENARIO, policy=PRESETS["quantum"]))
    ran = Ran(capsys, trace, "--diff", other)
    assert ran.code == 1 and "header policy.name" in ran.out and "this " in ran.out
    assert Ran(capsys, trace, "--diff", tmp_path / "none.jsonl").code == 2


def test_what_if(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "o.jsonl"
    ran = Ran(capsys, trace, "--what-if", "policy=mixed", "--out", out)
    assert ran.code == 0
    assert "recorded      modelled       what if" in ran.out and f"wrote {out}" in ran.out
    assert "costs fitted to this trace" in ran.out
    found = Ran(capsys, trace, "--what-if", "policy=mixed", "--json").object()
    assert found["recorded"]["policy"] == "barrier-fair" and found["what if"]["policy"] == "mixed"
    assert found["what if"]["mixed_rounds"] > 0 == found["recorded"]["mixed_rounds"]
    made = Ran(capsys, out, "--json").object()
    assert made["exit_code"] == 0 and made["events"] == found["what if"]["events"]
    named = Ran(capsys, trace, "--what-if", "slots=1", "--cost", "cpu-smollm2")
    assert named.code == 0 and "cpu-smollm2" in named.out
    ran = Ran(capsys, trace, "--what-if", "policy=best")
    assert ran.code == 2 and "policy=best is not one of" in ran.err
    ran = Ran(capsys, trace, "--what-if", "slots=1", "--cost", "abacus")
    assert ran.code == 2 and "abacus" in ran.err and "--cost" in ran.err


def test_inject(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "o.jsonl"
    ran = Ran(capsys, trace, "--inject", "lost@9", "--out", out)
    assert ran.code == 0 and "as recorded up to event 9" in ran.out
    assert Ran(capsys, out, "--json").object()["outcomes"]["engine_lost"] == 4
    assert out.read_bytes().splitlines()[:11] == trace.read_bytes().splitlines()[:11]
    ran = Ran(capsys, trace, "--inject", "slow=1x@9", "--out", out)
    assert ran.code == 0 and out.read_bytes() == trace.read_bytes(), "nothing was disturbed"
    found = Ran(capsys, trace, "--inject", "cancel@5:req:1", "--json").object()
    assert found["injected"]["cancelled"] == 2 and found["recorded"]["cancelled"] == 1
    ran = Ran(capsys, trace, "--inject", "fail@5,fail@888")
    assert ran.code == 2 and "fail@888 did not strike" in ran.err
    ran = Ran(capsys, trace, "--inject", "melt@5")
    assert ran.code == 2 and "'melt@5' is not cancel@SEQ:req:ID" in ran.err


def test_shrink(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "o.jsonl"
    asked = ("--shrink", "--predicate", "barrier_wait_max_ms > 30")
    ran = Ran(capsys, trace, *asked, "--out", out)
    assert ran.code == 0 and ran.out.startswith("# 4 requests shrunk to 2 in ")
    compile(ran.out, "snippet", "exec")
    assert Ran(capsys, out, "--stats", "--json").object()["stats"]["barrier_wait_s"]["max"] > 0.03
    found = Ran(capsys, trace, *asked, "--json").object()
    assert found["requests"] == 2 and found["minimal"] and "def test_shrunk" in found["test"]
    ran = Ran(capsys, trace, *asked, "--tries", "3")
    assert "stopped at --tries" in ran.out
    for arguments, message in (
        (("--shrink",), "--shrink wants --predicate"),
        ((*asked[:2], "rounds > 9999"), "does not hold for this trace"),
        ((*asked[:2], "speed > 1"), "'speed' is not one of"),
        ((*asked, "--tries", "0"), "--tries 0: must be at least 1"),
    ):
        ran = Ran(capsys, trace, *arguments)
        assert ran.code == 2 and message in ran.err


@pytest.mark.parametrize("options", [("--what-if", "slots=1"), ("--inject", "fail@3")])
def test_nothing_follows_from_what_does_not_replay(
    trace: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, str]
):
    edit(trace, 9, '"duration_ns":', '"duration_ns":1')
    ran = Ran(capsys, trace, *options)
    assert ran.code == 1 and "DIVERGED at line 9" in ran.err and "--force" in ran.err
    assert Ran(capsys, trace, *options, "--force").code == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--diff", "x", "--stats"), "--diff goes without --stats"),
        (("--what-if", "slots=1", "--until", "3"), "--what-if goes without --until"),
        (("--step", "--show", "kv"), "--step goes without --show"),
        (("--step", "--json"), "--step goes without --json"),
        (("--engine", "--twice"), "--engine goes without --twice"),
        (("--out", "x"), "--out goes with --what-if or --inject or --shrink"),
        (("--predicate", "rounds > 1"), "--predicate goes with --shrink"),
        (("--inject", "fail@3", "--tries", "4"), "--tries goes with --shrink"),
    ],
)
def test_no_option_is_silently_ignored(
    trace: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
):
    ran = Ran(capsys, trace, *options)
    assert ran.code == 2 and message in ran.err


def test_two_changes_at_once_are_refused(trace: Path, capsys: pytest.CaptureFixture[str]):
    assert Ran(capsys, trace, "--what-if", "slots=1", "--shrink").code == 2


# --- the rest -------------------------------------------------------------------------------------


def test_a_bar_for_long_traces_in_a_terminal(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    assert Ran(capsys, trace).err == ""
    monkeypatch.setattr(replay_files, "PROGRESS_BYTES_MIN", 0)
    assert Ran(capsys, trace).err == "", "no terminal, no bar"

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    assert main(["replay", str(trace)]) == 0
    assert "replay" in screen.getvalue() and "%" in screen.getvalue()


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]):
    ran = Ran(capsys, "--help")
    assert ran.code == 0
    for option in ("until", "step", "back", "show", "why", "stats", "csv", "perfetto", "redact",
                   "diff", "what-if", "inject", "shrink", "engine", "predicate", "tries", "cost",
                   "out", "force", "twice", "check", "json"):  # fmt: skip
        assert f"--{option}" in ran.out
    assert "Exit codes: 0 equal" in ran.out
