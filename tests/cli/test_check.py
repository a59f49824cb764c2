"""Goal: `phaseloop check` says what was visited and what held, and exits accordingly.

Method: the command line, run in this process on worlds of one or two requests; faults are planted
in the reducer to see it fail, and the trace it leaves is opened by `phaseloop replay`.
"""

import json

import pytest

from phaseloop.cli.check_report import ranges_text
from phaseloop.cli.main import main
from phaseloop.core import reduce as reduce_module
from phaseloop.core.invariants import promises
from phaseloop.core.policy import PRESETS

SMALL = ["check", "--requests", "2", "--tokens", "2", "--cancels", "0", "--failures", "0"]


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_json(capsys, *arguments: str) -> tuple[int, dict]:
    code = main([*SMALL, "--jobs", "1", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


def test_every_policy_is_checked_and_only_mixed_mixes(capsys):
    code, report = run_json(capsys)
    assert code == 0 and report["holds"]
    assert [run["policy"] for run in report["runs"]] == list(PRESETS)
    for run in report["runs"]:
        promised = promises(PRESETS[run["policy"]])
        held = [name for name, verdict in run["invariants"].items() if verdict == "holds"]
        assert held == [*promised, "core"]
        assert (run["mixed_round"] is not None) == (run["policy"] == "mixed")
        assert run["completion"]["longest"] <= run["completion"]["bound"]


def test_the_table_says_what_mixed_does_not_promise(capsys):
    assert main([*SMALL, "--jobs", "1", "--policy", "mixed,barrier-fair"]) == 0
    out = capsys.readouterr().out
    assert "mixed: does not promise I1" in out
    assert "a mixed round was found after 4 events" in out
    assert "barrier-fair promises I1-I5, I7-I12" in out
    assert out.count("holds") == 2


def test_features_are_runs_of_their_own(capsys):
    code, report = run_json(
        capsys, "--policy", "barrier-fair", "--feature", "groups,drafts", "--requests", "1"
    )
    assert code == 0
    assert [run["feature"] for run in report["runs"]] == ["groups", "drafts"]


def test_processes_change_nothing_but_the_time(capsys):
    arguments = ["--policy", "mixed,barrier-greedy,barrier-serial", "--requests", "1"]
    reports = [run_json(capsys, *arguments, "--jobs", jobs)[1] for jobs in ("1", "2")]
    for report in reports:
        for run in report["runs"]:
            del run["seconds"]
    assert reports[0] == reports[1]


def test_a_limit_leaves_the_question_open(capsys):
    code = main([*SMALL, "--jobs", "1", "--policy", "quantum", "--limit-states", "40"])
    out = capsys.readouterr().out
    assert code == 3
    assert "undecided, --limit-states was reached" in out and "holds" not in out


# --- what does not hold ---------------------------------------------------------------------------


@pytest.fixture
def unsealed(monkeypatch):
    monkeypatch.setattr(reduce_module, "seal", lambda state, seen: state)


@pytest.mark.usefixtures("unsealed")
def test_a_broken_promise_leaves_a_trace_that_replay_opens(capsys, tmp_path):
    assert main([*SMALL, "--jobs", "1", "--policy", "barrier-fair"]) == 1
    out = capsys.readouterr().out
    assert "breaks I3" in out and "the shortest script, 3 events" in out
    assert "request 0 arrives" in out and "-> " in out
    assert main(["replay", "check-violation.jsonl"]) == 0
    assert "chain equal" in capsys.readouterr().out


@pytest.mark.usefixtures("unsealed")
def test_several_broken_runs_leave_a_trace_each(capsys, tmp_path):
    code, report = run_json(
        capsys, "--policy", "barrier-fair,barrier-greedy,mixed", "--script", "found.jsonl"
    )
    assert code == 1 and not report["holds"]
    traces = [run["trace"] for run in report["runs"]]
    assert traces == ["found.base.barrier-fair.jsonl", "found.base.barrier-greedy.jsonl", None]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(filter(None, traces))
    fair = report["runs"][0]
    assert fair["verdict"] == "broken"
    assert fair["invariants"]["I3"] == "broken"
    assert fair["invariants"]["I1"] == "undecided"
    assert fair["violation"]["script"][0]["event"] == "RequestArrived"


@pytest.mark.usefixtures("unsealed")
def test_a_script_that_cannot_be_written_is_a_plain_error(capsys, tmp_path):
    missing = tmp_path / "nowhere" / "found.jsonl"
    assert main([*SMALL, "--policy", "barrier-fair", "--jobs", "1", "--script", str(missing)]) == 2
    assert f"--script {missing}: No such file or directory" in capsys.readouterr().err


def test_a_reducer_that_raises_is_shown_without_a_traceback(monkeypatch, capsys):
    def fail(*_: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(reduce_module, "on_round_completed", fail)
    assert main([*SMALL, "--jobs", "1", "--policy", "barrier-fair"]) == 1
    out = capsys.readouterr().out
    assert "breaks core: RoundCompleted raised ZeroDivisionError: planted" in out
    assert "raises ZeroDivisionError: planted" in out


# --- what cannot be asked -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value", "complaint"),
    [
        ("--slots", "0", "--slots: 0 is not from 1 to 4"),
        ("--slots", "5", "--slots: 5 is not from 1 to 4"),
        ("--requests", "9", "--requests: 9 is not from 1 to 8"),
        ("--prompt-rounds", "five", "--prompt-rounds: 'five' is not an integer from 1 to 4"),
        ("--tokens", "0", "--tokens: 0 is not from 1 to 8"),
        ("--cancels", "-1", "--cancels: -1 is not from 0 to 8"),
        ("--failures", "9", "--failures: 9 is not from 0 to 8"),
        ("--jobs", "0", "--jobs: 0 is not from 1 to 256"),
        ("--limit-states", "0", "--limit-states: 0 is not from 1 to 1000000000"),
        ("--policy", "fair", "--policy: no policy 'fair'; there are all, mixed,"),
        ("--feature", "base,x", "--feature: no feature 'x'; there are all, base,"),
    ],
)
def test_a_bad_option_is_named_with_its_range(capsys, option, value, complaint):
    assert main(["check", option, value]) == 2
    assert complaint in capsys.readouterr().err


def test_ranges_are_short():
    assert ranges_text(["I1", "I2", "I3", "I5", "I7", "I8"]) == "I1-I3, I5, I7-I8"
    assert ranges_text(["I12"]) == "I12"
