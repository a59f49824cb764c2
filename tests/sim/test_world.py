"""Goal: simulated runs are the scheduler's own, complete, repeatable, and harmed only where asked.

Method: the shipped workloads and small ones under every policy; every step held to the invariants;
tokens counted against what the requests hold; traces compared byte by byte, also between processes.
"""

import subprocess
import sys
from collections import Counter
from io import BytesIO
from pathlib import Path

import pytest
from msgspec.structs import replace

from phaseloop.core.invariants import check
from phaseloop.core.policy import PRESETS
from phaseloop.core.state import Limits
from phaseloop.core.transitions import check_step
from phaseloop.core.vocabulary import (
    DeliverTokens,
    FinishChoice,
    FinishRequest,
    LaunchRound,
    Request,
    RequestSeated,
)
from phaseloop.engine.protocol import limits_of
from phaseloop.engine.sim import Prefix, SimModel, describe
from phaseloop.engine.sim_faults import Faults, parse_failure, parse_slowness
from phaseloop.engine.sim_presets import SMOLLM, V100, V100_MTP
from phaseloop.runtime.trace import open_trace
from phaseloop.sim.arrivals import Arrival, arrivals_of
from phaseloop.sim.workload import read_workload
from phaseloop.sim.world import Scene, simulate

S = 1_000_000_000
ROOT = Path(__file__).parents[2]


def workload_of(name: str, count: int | None = None):
    workload = read_workload(ROOT / "fixtures" / "workloads" / f"{name}.toml")
    return workload if count is None else replace(workload, count=count)


def scene_of(policy: str, model: SimModel = V100, **limits) -> Scene:
    return Scene(
        limits=replace(limits_of(describe(model)), **limits), policy=PRESETS[policy], model=model
    )


class Ledger:
    """Watches a run: tokens and end of every choice, ends of requests, kinds of rounds."""

    def __init__(self) -> None:
        self.tokens = Counter()
        self.choice_ends = {}
        self.ends = {}
        self.kinds = Counter()
        self.cached = {}

    def __call__(self, event, before, after, effects) -> None:
        check_step(before, event, after, effects)
        check(after)
        if isinstance(event, RequestSeated):
            self.cached[event.request_id, event.choice] = event.cached_length
        for effect in effects:
            if isinstance(effect, DeliverTokens):
                for delivery in effect.deliveries:
                    self.tokens[delivery.request_id, delivery.choice] += delivery.tokens
            elif isinstance(effect, LaunchRound):
                self.kinds[effect.kind] += 1
            elif isinstance(effect, FinishChoice):
                self.choice_ends[effect.request_id, effect.choice] = effect.reason
            elif isinstance(effect, FinishRequest):
                assert effect.request_id not in self.ends
                self.ends[effect.request_id] = effect.reason


def run(scene: Scene, arrivals, **options) -> Ledger:
    ledger = Ledger()
    simulate(scene, iter(arrivals), watch=ledger, **options)
    return ledger


def hidden_tokens(arrivals) -> dict[tuple[int, int], int]:
    """What each choice gets if nobody cuts it short: its text, or as much as was asked for."""
    tokens = {}
    for arrival in arrivals:
        request = arrival.request
        for choice, output in enumerate(arrival.outputs):
            bounds = [n for n in (output, request.output_limit) if n is not None]
            tokens[request.request_id, choice] = min(bounds)
    return tokens


# --- conservation (I9) ----------------------------------------------------------------------------

CONSERVED = ["open-loop-high", "agents-shared-prefix", "pair", "pair-reversed", "many-short"]


@pytest.mark.parametrize("policy", PRESETS)
@pytest.mark.parametrize("name", CONSERVED)
def test_everybody_gets_the_tokens_of_their_text(name, policy):
    arrivals = list(arrivals_of(workload_of(name, count=60), 1))
    ledger = run(scene_of(policy, V100_MTP), arrivals)
    expected = hidden_tokens(arrivals)
    ended = [key for key, reason in ledger.choice_ends.items() if reason in ("stop", "length")]
    assert len(ended) >= 0.8 * len(expected)
    assert {key: ledger.tokens[key] for key in ended} == {key: expected[key] for key in ended}
    assert len(ledger.ends) == len(arrivals)
    assert all(ledger.tokens[key] <= expected[key] for key in ledger.tokens)


@pytest.mark.parametrize("policy", PRESETS)
def test_the_context_ends_what_nothing_else_does(policy):
    model = replace(SMOLLM, capacity=replace(SMOLLM.capacity, context_length=300))
    ledger = run(scene_of(policy, model), [Arrival(0, Request(0, 100), (None,))])
    assert ledger.ends == {0: "length"}
    assert ledger.tokens[0, 0] == 200


# --- which rounds ---------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", PRESETS)
@pytest.mark.parametrize("name", ["open-loop-medium", "long-stream", "many-short"])
def test_only_mixed_mixes(name, policy):
    workload = workload_of(name)
    scene = replace(scene_of(policy), cut_ns=200 * S)
    summary = simulate(scene, arrivals_of(workload, workload.seed))
    assert (summary.mixed_rounds > 0) == (policy == "mixed")


def test_a_long_stream_starves_others_under_a_barrier_and_not_under_quantum():
    workload = workload_of("long-stream", count=13)
    scenes = (
        replace(scene_of(name), cut_ns=300 * S) for name in ("barrier-fair", "quantum", "mixed")
    )
    summaries = {one.policy.name: simulate(one, arrivals_of(workload, 0)) for one in scenes}
    assert summaries["barrier-fair"].finished == 0
    assert summaries["barrier-fair"].ttft_s.max > 200
    for policy in ("quantum", "mixed"):
        assert summaries[policy].unfinished == 1
        assert summaries[policy].ttft_s.max < 10


# --- the same run again ---------------------------------------------------------------------------


def traced(policy: str, name: str, **options) -> bytes:
    out = BytesIO()
    simulate(
        scene_of(policy, V100_MTP), arrivals_of(workload_of(name, 200), 4), trace=out, **options
    )
    return out.getvalue()


@pytest.mark.parametrize("policy", ["mixed", "barrier-fair", "quantum"])
def test_two_runs_are_one_trace(policy):
    assert traced(policy, "many-short") == traced(policy, "many-short")


SCRIPT = """
import sys
from hashlib import sha256
from phaseloop.cli.main import main
assert main(["simulate", sys.argv[1], "--trace", sys.argv[2], "--policy", "quantum", "--jitter",
             "20", "--engine", "v100x4-qwen27b-mtp", "--fail", "lane@1%", "--slow", "3x@2%"]) == 0
"""


@pytest.mark.parametrize("name", ["many-short", "agents-shared-prefix"])
def test_processes_with_other_hash_seeds_write_the_same_trace(name, tmp_path):
    workload = ROOT / "fixtures" / "workloads" / f"{name}.toml"
    traces = []
    for seed in ("0", "1", "4711"):
        path = tmp_path / f"{seed}.jsonl"
        command = [sys.executable, "-c", SCRIPT, str(workload), str(path)]
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT / "src")}
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        traces.append(path.read_bytes())
    assert traces[0] == traces[1] == traces[2]
    assert len(traces[0]) > 100_000


def test_a_trace_says_how_the_run_ended(tmp_path):
    path = tmp_path / "trace.jsonl"
    for cut_ns, reason in ((None, "done"), (3 * S, "cut")):
        with path.open("wb") as out:
            scene = replace(scene_of("barrier-fair"), cut_ns=cut_ns, seed=9)
            simulate(scene, arrivals_of(workload_of("pair"), 0), trace=out)
        with open_trace(path) as reader:
            for _ in reader:
                pass
        assert (reader.footer.reason, reader.footer.exit_code) == (reason, 0)
        assert (reader.header.engine, reader.header.seed) == ("v100x4-qwen27b", 9)


def test_watching_and_tracing_change_nothing():
    workload = workload_of("many-short", count=100)
    scene = scene_of("barrier-fair")
    plain = simulate(scene, arrivals_of(workload, 4))
    watched = simulate(scene, arrivals_of(workload, 4), watch=Ledger(), trace=BytesIO())
    assert plain == watched


# --- clients --------------------------------------------------------------------------------------


def alone(output: int | None = 100, prompt: int = 10, **doing) -> Arrival:
    return Arrival(0, Request(0, prompt), (output,), **doing)


def test_a_client_goes_away_after_some_tokens():
    ledger = run(scene_of("barrier-fair"), [alone(cancel_after_tokens=5)])
    assert ledger.ends == {0: "cancelled"}
    assert ledger.tokens[0, 0] == 5


def test_a_client_goes_away_after_some_time():
    ledger = run(scene_of("barrier-fair"), [alone(None, cancel_after_ns=10 * S)])
    assert ledger.ends == {0: "cancelled"}
    assert 225 < ledger.tokens[0, 0] < 235  # ten seconds of rounds of 43 ms


def test_a_client_that_is_gone_does_not_go_away_again():
    ledger = run(scene_of("barrier-fair"), [alone(3, cancel_after_ns=100 * S)])
    assert ledger.ends == {0: "stop"}


def test_a_client_that_stalls_is_waited_for_and_served_on():
    ends = {}
    for seconds in (20, 40):
        arrival = alone(stall_after_tokens=5, stall_ns=seconds * S)
        ledger = run(scene_of("barrier-fair"), [arrival])
        ends[seconds] = (ledger.ends[0], ledger.tokens[0, 0])
    assert ends[20] == ("stop", 100)
    assert ends[40][0] == "stalled"  # after 30 s, and with no more than the round that was running
    assert ends[40][1] <= 6


def test_a_cancelled_round_ends_at_its_next_step():
    """The abort is the engine's: only prompt rounds have steps within."""
    finish_ns = []

    def watch(event, before, after, effects) -> None:
        if before.flight is not None and after.flight is None:
            finish_ns.append(event.at_ns)

    arrival = alone(prompt=2048, cancel_after_ns=S // 10)
    simulate(scene_of("barrier-fair"), iter([arrival]), watch=watch)
    (end_ns,) = finish_ns
    assert S // 10 < end_ns < S  # half of a round of 1.73 s


# --- caches ---------------------------------------------------------------------------------------


def test_shared_prompts_are_computed_once_by_those_who_come_together():
    workload = workload_of("agents-shared-prefix", count=8)
    team = list(arrivals_of(replace(workload, streams=workload.streams[:1]), 5))
    own = sum(one.request.prompt_length - 12_000 for one in team)
    prompts = {}
    for slots in (1, 8):
        scene = scene_of("barrier-fair", SMOLLM, slot_count=slots, context_length=20_000)
        scene = replace(scene, limits=replace(scene.limits, page_count=1000))
        prompts[slots] = simulate(scene, iter(team)).prefill_tokens
    assert prompts[1] == 12_000 + own  # one slot: found in place
    assert prompts[8] == 12_000 + own  # eight slots: forked from the first


def test_another_familys_prompt_is_not_found():
    arrivals = [
        replace(alone(3, prompt=5000), prefix=prefix_of(family), at_ns=family * 100 * S)
        for family in range(3)
    ]
    arrivals = [
        replace(one, request=replace(one.request, request_id=n)) for n, one in enumerate(arrivals)
    ]
    ledger = run(scene_of("barrier-fair", slot_count=1), arrivals)
    assert set(ledger.cached.values()) == {0}


def prefix_of(family: int) -> Prefix:
    return Prefix(family, 4000)


def test_cached_prefixes_are_candidates_of_an_arrival():
    first = replace(alone(3, prompt=5000), prefix=prefix_of(0))
    second = replace(
        first, at_ns=100 * S, request=replace(first.request, request_id=1, prompt_length=6000)
    )
    seen = []

    def watch(event, before, after, effects) -> None:
        seen.extend(getattr(event, "requests", ()))

    ledger = Ledger()
    simulate(
        scene_of("barrier-fair"),
        iter([first, second]),
        watch=lambda *step: (ledger(*step), watch(*step)),
    )
    (candidate,) = seen[1].candidates
    assert (candidate.source, candidate.length) == ("slot", 4000)
    assert ledger.cached[1, 0] == 4000


# --- trouble --------------------------------------------------------------------------------------


def faults(*fails: str, slows: tuple[str, ...] = ()) -> Faults:
    return Faults(tuple(map(parse_failure, fails)), tuple(map(parse_slowness, slows)))


def three(limit: int = 20) -> list[Arrival]:
    return [Arrival(0, Request(n, 3000, output_limit=limit), (None,)) for n in range(3)]


@pytest.mark.parametrize("policy", PRESETS)
def test_a_failed_lane_harms_nobody_else(policy):
    ledger = run(scene_of(policy), three(), faults=faults("lane@1"))
    assert Counter(ledger.ends.values()) == {"failed": 1, "length": 2}
    served = [request_id for request_id, reason in ledger.ends.items() if reason == "length"]
    assert all(ledger.tokens[request_id, 0] == 20 for request_id in served)


@pytest.mark.parametrize("policy", PRESETS)
def test_a_failed_round_harms_those_in_it(policy):
    late = Arrival(60 * S, Request(3, 100, output_limit=5), (None,))
    ledger = run(scene_of(policy), [*three(), late], faults=faults("round@0"))
    failed = [request_id for request_id, reason in ledger.ends.items() if reason == "failed"]
    assert failed
    assert ledger.ends[3] == "length"
    assert all(reason in ("failed", "length") for reason in ledger.ends.values())


@pytest.mark.parametrize("policy", PRESETS)
def test_a_lost_engine_ends_everybody_and_the_run(policy, tmp_path):
    path = tmp_path / "trace.jsonl"
    late = Arrival(60 * S, Request(3, 100, output_limit=5), (None,))
    with path.open("wb") as out:
        ledger = run(scene_of(policy), [*three(), late], faults=faults("engine@2"), trace=out)
    assert ledger.ends == dict.fromkeys(range(3), "engine_lost")
    with open_trace(path) as reader:
        for _ in reader:
            pass
    assert (reader.footer.reason, reader.footer.exit_code) == ("engine_lost", 70)


def test_slow_rounds_take_their_time():
    plain = simulate(scene_of("barrier-fair"), iter(three()))
    slow = simulate(scene_of("barrier-fair"), iter(three()), faults=faults(slows=("2x@0-9999",)))
    assert slow.makespan_s == pytest.approx(2 * plain.makespan_s)
    assert slow.rounds == plain.rounds


@pytest.mark.parametrize("policy", PRESETS)
def test_trouble_everywhere_leaves_no_promise_broken(policy):
    workload = workload_of("agents-shared-prefix", count=40)
    trouble = faults("lane@3%", "round@2%", slows=("5x@3%",))
    scene = replace(scene_of(policy, V100_MTP, slot_count=3, page_count=130), seed=2)
    ledger = run(scene, arrivals_of(workload, 2), faults=trouble)
    assert len(ledger.ends) == 40
    assert ledger.kinds["fork"]
    assert set(ledger.ends.values()) >= {"failed", "stop"}


@pytest.mark.parametrize("policy", PRESETS)
def test_memory_that_runs_out_is_made_by_moving_sequences_out(policy):
    """Texts that outgrow their reservation: pages for six of the eight that fit the slots."""
    arrivals = [Arrival(0, Request(n, 200), (700 + 40 * n,)) for n in range(8)]
    limits = {"slot_count": 8, "page_count": 24, "output_reserve": 50}
    ledger = run(scene_of(policy, **limits), arrivals)
    assert ledger.ends == dict.fromkeys(range(8), "stop")
    assert all(ledger.tokens[n, 0] == 700 + 40 * n for n in range(8))
    assert ledger.kinds["save"] == ledger.kinds["restore"] > 0


def test_seats_are_lent_on_under_quantum():
    policy = replace(PRESETS["quantum"], seat_quantum_ns=5 * S)
    scene = replace(scene_of("quantum", slot_count=1), policy=policy)
    arrivals = [Arrival(0, Request(n, 100), (400,)) for n in range(3)]
    ledger = run(scene, arrivals)
    assert ledger.ends == dict.fromkeys(range(3), "stop")
    assert ledger.kinds["save"] > 2
    assert all(ledger.tokens[n, 0] == 400 for n in range(3))


def test_limits_have_the_engines_size():
    limits = limits_of(describe(V100))
    assert isinstance(limits, Limits)
    assert (limits.slot_count, limits.batch_tokens) == (4, 2048)
