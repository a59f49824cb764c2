"""Goal: `phaseloop simulate` answers the questions of its workloads, for people and for programs.

Method: whole command lines; figures from outside for the pair of prompts; each wrong command line
against its message and exit code, and never a traceback.
"""

import json
from pathlib import Path

import pytest

from phaseloop.cli.main import main
from phaseloop.core.policy import PRESETS
from phaseloop.engine.sim_presets import PRESETS as ENGINES
from phaseloop.sim.calibration import FIGURES

WORKLOADS = Path(__file__).parents[2] / "fixtures" / "workloads"
PAIR = str(WORKLOADS / "pair.toml")


def simulated(capsys, *arguments: str) -> str:
    assert main(["simulate", *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def objects(capsys, *arguments: str) -> dict[str, dict]:
    found = json.loads(simulated(capsys, *arguments, "--json"))
    return {one["policy"]: one for one in found}


# --- the figures ----------------------------------------------------------------------------------


def test_the_pair_takes_as_long_as_it_was_timed(capsys):
    found = objects(capsys, PAIR, "--compare", "all", "--max-round-ms", "0")
    assert list(found) == list(PRESETS)
    assert found["barrier-fair"]["prefill_makespan_s"] == pytest.approx(42.58, rel=0.02)
    assert found["barrier-serial"]["prefill_makespan_s"] == pytest.approx(42.26, rel=0.02)
    for policy in ("barrier-fair", "barrier-serial", "barrier-greedy"):
        assert found[policy]["prefill_rounds"] == 20
        assert found[policy]["mixed_rounds"] == 0
    assert found["mixed"]["mixed_rounds"] > 0


def test_the_pair_with_mtp(capsys):
    engine = ("--engine", "v100x4-qwen27b-mtp", "--max-round-ms", "0")
    fair = objects(capsys, PAIR, *engine)["barrier-fair"]
    waits = fair["barrier_wait_s"]["max"]
    assert fair["prefill_makespan_s"] == pytest.approx(45.7, rel=0.1)
    assert waits == pytest.approx(29.7, rel=0.1)
    assert fair["prefill_makespan_s"] - waits == pytest.approx(16.0, rel=0.1)


def test_the_order_of_the_pair_matters_one_after_the_other(capsys):
    reversed_pair = str(WORKLOADS / "pair-reversed.toml")
    options = ("--max-round-ms", "0", "--policy", "barrier-serial")
    fifo = objects(capsys, reversed_pair, *options)["barrier-serial"]
    shortest = objects(capsys, reversed_pair, *options, "--serial-order", "shortest")
    assert fifo["prefill_wait_s"]["max"] > 30  # the short prompt waits for the long one
    assert shortest["barrier-serial"]["prefill_wait_s"]["max"] < 8


def test_live_observation_is_answered_by_every_policy(capsys):
    found = objects(capsys, str(WORKLOADS / "live-mixed.toml"), "--compare", "all")
    assert all(one["finished"] == 2 for one in found.values())
    # What was seen: under continuous batching a token takes as long as a round of prompts.
    assert found["mixed"]["gap_s"]["p95"] > 0.5
    assert found["barrier-fair"]["gap_s"]["max"] < 0.2
    assert found["quantum"]["ttft_s"]["p50"] < found["barrier-fair"]["ttft_s"]["p50"] / 3


# --- for programs ---------------------------------------------------------------------------------

KEYS = {
    "policy", "prefill_makespan_s", "makespan_s", "prefill_tokens_per_s", "decode_tokens_per_s",
    "ttft_s", "gap_s", "queue_wait_s", "barrier_wait_s", "prefill_wait_s", "rounds",
    "mixed_rounds", "events", "decode_occupancy", "finished", "refused", "failed", "engine", "seed",
}  # fmt: skip


def test_json_is_an_array_of_one_object_per_policy(capsys):
    found = json.loads(simulated(capsys, PAIR, "--compare", "mixed,quantum", "--json"))
    assert [one["policy"] for one in found] == ["mixed", "quantum"]
    for one in found:
        assert set(one) >= KEYS
        for wait in ("ttft_s", "gap_s", "queue_wait_s", "barrier_wait_s", "prefill_wait_s"):
            assert set(one[wait]) == {"p50", "p95", "p99", "max"}
        assert (one["engine"], one["seed"], one["workload"]) == ("v100x4-qwen27b", 0, "pair")


def test_a_single_policy_is_an_array_too(capsys):
    (one,) = json.loads(simulated(capsys, PAIR, "--json"))
    assert one["policy"] == "barrier-fair"


def test_the_seed_is_the_workloads_unless_it_is_stated(capsys):
    path = str(WORKLOADS / "many-short.toml")
    default, stated, other = (
        objects(capsys, path, *seed)["barrier-fair"]
        for seed in ((), ("--seed", "3"), ("--seed", "4"))
    )
    assert default == stated
    assert other["seed"] == 4
    assert other["ttft_s"] != default["ttft_s"]


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "field", "holds"),
    [
        (("--slots", "1"), "queue_wait_s", lambda wait: wait["max"] > 7),
        (("--batch", "512", "--max-round-ms", "0"), "prefill_rounds", lambda n: n == 80),
        (("--max-round-ms", "500"), "prefill_rounds", lambda n: n > 80),
        (("--context", "16384"), "refused", lambda n: n == 1),
        (("--pages", "40"), "refused", lambda n: n == 1),
        (("--pages", "130"), "queue_wait_s", lambda wait: wait["max"] > 7),
        (("--max-queued", "1"), "refused", lambda n: n == 0),
        (("--slots", "1", "--max-queued", "1"), "finished", lambda n: n == 2),
        (("--slots", "1", "--max-queued", "0"), "refused", lambda n: n == 1),
        (("--slots", "1", "--max-queue-ms", "3000"), "expired", lambda n: n == 1),
        (("--policy", "quantum", "--pp-quantum-ms", "60000"), "phase_changes", lambda n: n < 5),
        (("--policy", "quantum", "--tg-quantum-ms", "60000"), "gap_s", lambda g: g["max"] < 0.1),
        (("--linger-ms", "5000"), "makespan_s", lambda s: s > 50),
        (("--fail", "round@3"), "failed", lambda n: n == 2),
        (("--fail", "lane@3", "lane@40.1"), "failed", lambda n: n >= 1),
        (("--fail", "engine@10s"), "failed", lambda n: n == 2),
        (("--slow", "2x@0-9999", "--max-round-ms", "0"), "prefill_makespan_s", lambda s: s > 85),
        (("--jitter", "10", "--max-round-ms", "0"), "prefill_makespan_s", lambda s: s != 42.673194),
        (("--engine", "cpu-smollm2"), "refused", lambda n: n == 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_options_have_their_effect(options, field, holds, capsys):
    (one,) = objects(capsys, PAIR, *options).values()
    assert holds(one[field]), one[field]


def test_output_reserve_and_stall_time(capsys, tmp_path):
    path = tmp_path / "load.toml"
    path.write_text(
        "[[request]]\nprompt = 100\noutput = 50\n"
        "stall = { after_tokens = 5, for_s = 10 }\n"
        "[[request]]\nprompt = 100\noutput = 50\n"
    )
    assert objects(capsys, str(path))["barrier-fair"]["finished"] == 2
    stalled = objects(capsys, str(path), "--client-stall-ms", "5000")["barrier-fair"]
    assert (stalled["finished"], stalled["cancelled"]) == (1, 1)
    reserve = ("--pages", "4", "--output-reserve")
    assert objects(capsys, str(path), *reserve, "900")["barrier-fair"]["queue_wait_s"]["max"] > 2
    assert objects(capsys, str(path), *reserve, "100")["barrier-fair"]["queue_wait_s"]["max"] < 1


def test_drafts(capsys):
    path = str(WORKLOADS / "many-short.toml")
    engine = ("--engine", "v100x4-qwen27b-mtp")
    three = objects(capsys, path, *engine)["barrier-fair"]
    none = objects(capsys, path, *engine, "--draft", "0")["barrier-fair"]
    assert none["decode_rounds"] > 1.5 * three["decode_rounds"]


def test_seats_are_lent(capsys, tmp_path):
    path = tmp_path / "load.toml"
    path.write_text("[[request]]\nprompt = 9\nlimit = 900\n" * 2)
    options = ("--policy", "quantum", "--slots", "1")
    kept = objects(capsys, str(path), *options)["quantum"]
    lent = objects(capsys, str(path), *options, "--seat-quantum-ms", "4000")["quantum"]
    assert lent["queue_wait_s"]["max"] < kept["queue_wait_s"]["max"] / 3


# --- for people -----------------------------------------------------------------------------------


def test_the_table(capsys):
    lines = simulated(capsys, PAIR, "--compare", "all", "--max-round-ms", "0").splitlines()
    assert "pair on v100x4-qwen27b; 4 slots; rounds of 2048 tokens" in lines[0]
    assert "tokens alone" in lines[0]
    (row,) = [line for line in lines if line.startswith("all prompts done")]
    seconds = ["42.69", "42.66", "42.35", "42.67", "42.35", "42.99"]
    assert row.split()[3:] == [word for number in seconds for word in (number, "s")]
    assert max(map(len, lines[1:])) <= 100
    assert not any("cancelled" in line for line in lines)  # nobody was


def test_the_list_of_engines_says_what_is_fitted_and_what_predicted(capsys):
    text = simulated(capsys, "--list-engines")
    for name, preset in ENGINES.items():
        assert name in text
        for parameter, source in preset.sources.items():
            assert parameter in text
            assert source in text
        for figure in FIGURES[name]:
            assert f"{figure.use}: {figure.what}" in text
    assert text.count("predicted: pair") >= 2


def test_help_states_what_is_measured(capsys):
    assert main(["simulate", "--help"]) == 0
    text = capsys.readouterr().out
    for words in ("nearest-rank", "decode_tokens_per_s", "barrier_wait_s", "(2000)"):
        assert words in text


# --- traces and fits ------------------------------------------------------------------------------


def test_a_trace_can_be_replayed(capsys, tmp_path):
    trace = tmp_path / "pair.jsonl"
    simulated(capsys, PAIR, "--trace", str(trace))
    assert main(["replay", str(trace)]) == 0
    capsys.readouterr()


def test_several_policies_write_several_traces(capsys, tmp_path):
    simulated(capsys, PAIR, "--compare", "mixed,quantum", "--trace", str(tmp_path / "t.jsonl"))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "t.mixed.jsonl",
        "t.quantum.jsonl",
    ]


def test_an_engine_is_fitted_written_and_used(capsys, tmp_path):
    trace, engine = tmp_path / "short.jsonl", tmp_path / "mine.toml"
    path = str(WORKLOADS / "many-short.toml")
    before = objects(capsys, path, "--trace", str(trace))["barrier-fair"]
    text = simulated(capsys, "--fit", str(trace), "--fit-out", str(engine))
    assert "812,000" in text
    assert "No round says anything about" in text
    after = objects(capsys, path, "--engine", str(engine), "--max-round-ms", "1000")
    assert after["barrier-fair"]["engine"] == "fitted-mine"
    assert after["barrier-fair"]["makespan_s"] == pytest.approx(before["makespan_s"], rel=1e-3)


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no workload: name a TOML file"),
        (("nowhere.toml",), "nowhere.toml: No such file or directory"),
        ((str(WORKLOADS),), "Is a directory"),
        ((PAIR, "--policy", "barier-fair"), "did you mean 'barrier-fair'"),
        ((PAIR, "--compare", "mixed,fast"), "no policy 'fast'"),
        ((PAIR, "--compare", "mixed,mixed"), "--compare: mixed twice"),
        ((PAIR, "--compare", "all", "--policy", "mixed"), "not allowed with argument"),
        ((PAIR, "--engine", "v100x4-qwen27"), "did you mean 'v100x4-qwen27b'"),
        ((PAIR, "--engine", "no.toml"), "no.toml: No such file"),
        ((PAIR, "--engine", PAIR), "pair.toml: name is missing"),
        ((PAIR, "--slots", "0"), "argument --slots: 0 is not from 1 to 4096"),
        ((PAIR, "--slots", "many"), "argument --slots: 'many' is not an integer"),
        ((PAIR, "--batch", "0"), "argument --batch: 0 is not from 1"),
        ((PAIR, "--max-round-ms", "-1"), "argument --max-round-ms: -1 is not from 0"),
        ((PAIR, "--jitter", "101"), "argument --jitter: 101 is not from 0 to 100"),
        ((PAIR, "--seed", "-1"), "argument --seed: -1 is not from 0"),
        ((PAIR, "--draft", "2"), "--draft 2: engine v100x4-qwen27b has no drafter"),
        ((PAIR, "--tg-quantum-ms", "9"), "--tg-quantum-ms is for quantum, not for barrier-fair"),
        ((PAIR, "--linger-ms", "9", "--policy", "mixed"), "--linger-ms is for barrier-greedy"),
        ((PAIR, "--serial-order", "fifo"), "--serial-order is for barrier-serial"),
        ((PAIR, "--fail", "round"), "after the @ comes a round"),
        ((PAIR, "--fail", "disk@3"), "must be lane@WHEN, round@WHEN or engine@WHEN"),
        ((PAIR, "--slow", "3@4"), "must be FACTORx@WHEN"),
        (("--fail", "round@3", PAIR), "was read as a fault: put it first"),
        ((PAIR, "--policy="), "no policy ''"),
        ((PAIR, "--trace", ""), "the path is empty"),
        ((PAIR, "--trace", PAIR), "would overwrite the workload"),
        ((PAIR, "--trace", "/nowhere/trace"), "/nowhere/trace: No such file"),
        (("--list-engines", "--json"), "--list-engines goes without --json"),
        (("--fit", PAIR, PAIR), "--fit goes without the workload"),
        (("--fit", PAIR), "pair.toml, line 1"),
        (("--fit-out", "x.toml", PAIR), "--fit-out goes with --fit"),
        ((PAIR, "--speed", "3"), "unrecognized arguments: --speed"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(Path(v).name for v in value),
)
def test_what_is_wrong_is_said(arguments, message, capsys):
    assert main(["simulate", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
    assert "Traceback" not in captured.err


def test_a_mistake_in_a_workload_is_named_with_its_file(capsys, tmp_path):
    path = tmp_path / "load.toml"
    path.write_text("[[request]]\nprompt = -5\n")
    assert main(["simulate", str(path)]) == 2
    expected = f"phaseloop: {path}: request[1].prompt = -5: must be from 1 to 268435456\n"
    assert capsys.readouterr().err == expected
