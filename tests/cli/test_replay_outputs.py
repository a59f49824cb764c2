"""Goal: replay writes what it was told to, over nobody's file, and blames the one that is full.

Method: every output option on inputs, on other outputs, on a device that is always full and on one
that another writer holds; values that change nothing; standard streams that are full or closed.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from replay_runs import SCENARIO, Ran, record

from phaseloop.cli.main import main
from phaseloop.runtime.output import create

OUTPUTS = ("--csv", "--perfetto", "--redact")
FULL = Path("/dev/full")
PHASELOOP = [sys.executable, "-m", "phaseloop", "replay"]

pytestmark = pytest.mark.skipif(not FULL.exists(), reason="the system has no /dev/full")


@pytest.fixture
def trace(tmp_path) -> Path:
    return record(tmp_path / "t.jsonl")


@pytest.mark.parametrize("option", OUTPUTS)
def test_a_full_disk_is_blamed_on_the_file_that_is_full(trace, capsys, option):
    ran = Ran(capsys, trace, option, FULL)
    assert ran.code == 2
    assert ran.err == "phaseloop: /dev/full: No space left on device\n"


@pytest.mark.parametrize(
    "change", [("--what-if", "slots=1"), ("--inject", "lost@9"), ("--inject", "fail@3")]
)
def test_so_is_the_trace_of_a_changed_run(trace, capsys, change):
    ran = Ran(capsys, trace, *change, "--out", FULL)
    assert (ran.code, ran.err) == (2, "phaseloop: /dev/full: No space left on device\n")


@pytest.mark.parametrize("options", [(), ("--stats",), ("--why", "req:1"), ("--step",)])
def test_a_full_standard_output_is_called_output(trace, options):
    with FULL.open("w") as full:
        done = subprocess.run(
            [*PHASELOOP, trace, *options],
            stdin=subprocess.DEVNULL, stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (2, "phaseloop: output: No space left on device\n")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_traceback(trace, closed):
    command = f'exec "$0" -m phaseloop replay "$1" {closed}'
    done = subprocess.run(
        ["sh", "-c", command, sys.executable, trace], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and done.stderr == ""


def test_a_reader_that_has_enough_is_no_error(trace):
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [*PHASELOOP, trace], stdout=write_end, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write_end)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("second", OUTPUTS[1:])
def test_two_outputs_are_two_files(trace, tmp_path, capsys, second):
    one = tmp_path / "x"
    same = tmp_path / "." / "x"
    ran = Ran(capsys, trace, "--csv", one, second, same)
    assert ran.code == 2 and f"--csv and {second} would both write" in ran.err
    assert not one.exists()
    one.symlink_to(tmp_path / "y")
    ran = Ran(capsys, trace, "--csv", one, second, tmp_path / "y")
    assert ran.code == 2 and not (tmp_path / "y").exists()


def test_an_output_is_no_other_input_either(trace, tmp_path, capsys):
    other = record(tmp_path / "other.jsonl", SCENARIO, seed=4)
    before = other.read_bytes()
    (tmp_path / "link").hardlink_to(trace)
    ran = Ran(capsys, trace, "--what-if", "slots=1", "--out", tmp_path / "link")
    assert ran.code == 2 and "--out" in ran.err and "would overwrite the trace" in ran.err
    assert other.read_bytes() == before


def test_outputs_may_be_one_device(trace, capsys):
    assert Ran(capsys, trace, "--csv", "/dev/null", "--perfetto", "/dev/null").code == 0


@pytest.mark.parametrize("option", OUTPUTS)
def test_a_file_has_one_writer(trace, tmp_path, capsys, option):
    path = tmp_path / "busy"
    with create(path) as held:
        held.write(b"half a")
        held.flush()
        ran = Ran(capsys, trace, option, path)
        assert ran.code == 2
        assert ran.err == (
            f"phaseloop: {path}: is being written by another process; name another file\n"
        )
        assert path.read_bytes() == b"half a", "and what it has written stays"
    assert Ran(capsys, trace, option, path).code == 0


def test_simulate_waits_for_nobody_either(tmp_path, capsys):
    path = tmp_path / "busy.jsonl"
    workload = Path(__file__).parents[2] / "fixtures" / "workloads" / "pair.toml"
    with create(path):
        assert main(["simulate", str(workload), "--trace", str(path)]) == 2
    assert "is being written by another process" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--what-if", "linger-ms=5,policy=quantum"), "linger-ms means nothing under quantum"),
        (("--what-if", "tg-quantum-ms=5"), "tg-quantum-ms means nothing under barrier-fair"),
        (("--what-if", "pp-quantum-ms=5"), "pp-quantum-ms means nothing under barrier-fair"),
        (("--what-if", "serial-order=shortest"), "serial-order means nothing under barrier-fair"),
        (("--what-if", "policy=quantum,seat-quantum-ms=5"), "cannot move sequences to host RAM"),
        (("--what-if", "slots=2"), "slots=2 is as it was recorded"),
        (("--what-if", "batch=32,slots=2"), "slots=2 is as it was recorded"),
        (("--what-if", "linger-ms=0"), "linger-ms=0 is as it was recorded"),
        (("--what-if", "policy=barrier-fair"), "policy=barrier-fair is as it was recorded"),
        (("--what-if", "policy="), "policy= is not one of mixed"),
        (("--inject", "cancel@3:req:999"), "cancel@3:req:999 finds nobody"),
        (("--inject", "slow=0x@3"), "a round takes some time"),
        (("--inject", "slow=0.000x@3"), "a round takes some time"),
    ],
)
def test_a_change_that_changes_nothing_is_refused(trace, capsys, options, says):
    ran = Ran(capsys, trace, *options)
    assert (ran.code, ran.out) == (2, "") and says in ran.err


def test_a_cancel_after_the_end_finds_nobody(trace, capsys):
    """Request 2 is cancelled in the recorded run, too: at the last event it is gone."""
    last = Ran(capsys, trace, "--json").object()["events"] - 1
    ran = Ran(capsys, trace, "--inject", f"cancel@{last}:req:2")
    assert ran.code == 2 and "finds nobody" in ran.err
    assert Ran(capsys, trace, "--inject", "cancel@4:req:2").code == 0


@pytest.mark.parametrize("arguments", [("",), ("x.jsonl", "--csv", ""), ("x.jsonl", "--diff", "")])
def test_an_empty_path_is_named(capsys, arguments):
    ran = Ran(capsys, *arguments)
    assert ran.code == 2 and "the path is empty" in ran.err


def test_a_byte_order_mark_is_named(trace, tmp_path, capsys):
    trace.write_bytes(b"\xef\xbb\xbf" + trace.read_bytes())
    ran = Ran(capsys, trace)
    assert ran.code == 2 and "line 1: begins with a byte order mark" in ran.err
    workload = tmp_path / "w.toml"
    workload.write_bytes(b"\xef\xbb\xbf[[stream]]\n")
    assert main(["simulate", str(workload)]) == 2
    assert "begins with a byte order mark" in capsys.readouterr().err
