"""Goal: exports, comparisons and changed runs of `phaseloop replay` do what its help says.

Method: the command is run in process on small traces that are written here; what it prints, writes
and returns is compared.
"""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace
from replay_runs import SCENARIO, Ran, edit, record

from phaseloop.core.policy import PRESETS


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return record(tmp_path / "t.jsonl")


# --- exports --------------------------------------------------------------------------------------


def test_exports_are_written_in_one_go(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    table, picture, shared = tmp_path / "o.csv", tmp_path / "o.json", tmp_path / "o.jsonl"
    ran = Ran(capsys, trace, "--csv", table, "--perfetto", picture, "--redact", shared)
    assert ran.code == 0
    assert [f"wrote {path}" in ran.out for path in (table, picture, shared)] == [True] * 3
    assert "nor anything else to drop: the chain is as it was" in ran.out
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
    assert ran.code == 2 and "would overwrite the trace" in ran.err
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
