"""Goal: a run that is made again repeats itself where nothing is changed, parts from it only where
it must, and shrinks to the least that shows a fault.

Method: whole simulations, with shared prefixes, drafts, cancels and stalls, are taken apart and
made again, from the beginning and from the middle; the events must be the same.  Faults are
injected into small scripted runs, where their consequences are known.
"""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from recordings import BUSY, COST, LIMITS, MS, call, cancel, record, scenario_of

from phaseloop.core.policy import PRESETS
from phaseloop.core.state import Limits
from phaseloop.core.vocabulary import (
    AnyEvent,
    FinishRequest,
    PolicyChanged,
    Request,
    RoundCompleted,
    RoundFailed,
    Shared,
    ShutdownRequested,
)
from phaseloop.engine.sim_presets import PRESETS as ENGINES
from phaseloop.runtime.trace import open_trace
from phaseloop.sim.arrivals import arrivals_of
from phaseloop.sim.replay import Fold, Step
from phaseloop.sim.replay_inject import FaultError, Injection, parse_faults
from phaseloop.sim.replay_rerun import Fault, Rerun, RerunError
from phaseloop.sim.replay_scenario import Answer, Scenario, Scribe
from phaseloop.sim.replay_shrink import requests_of
from phaseloop.sim.replay_whatif import ChangeError, parse_changes, summary_of
from phaseloop.sim.workload import read_workload
from phaseloop.sim.world import Scene, simulate

WORKLOAD = """
[run]
seed = 5
count = 40

[[stream]]
name = "chat"
arrivals = { kind = "poisson", per_s = 0.8 }
prompt = { kind = "lognormal", median = 900, sigma = 1.0, low = 10, high = 9000 }
output = { kind = "lognormal", median = 40, sigma = 0.8, low = 1, high = 300 }
limit = 120
cancel = { fraction = 0.2, after_tokens = 20 }
stall = { fraction = 0.2, after_tokens = 10, for_s = 3 }

[[stream]]
name = "agents"
arrivals = { kind = "burst", every_s = 20, size = 3, spread_s = 1 }
prompt = 5000
output = 30
limit = 60
prefix = { name = "system", length = 4000 }

[[stream]]
name = "pairs"
arrivals = { kind = "poisson", per_s = 0.1 }
prompt = 700
output = 20
limit = 40
choices = 2
queue_s_max = 8
"""


def simulated(tmp_path: Path, policy: str) -> Path:
    """A trace of a busy server with drafts, made by the simulator."""
    (tmp_path / "w.toml").write_text(WORKLOAD)
    workload = read_workload(tmp_path / "w.toml")
    model = ENGINES["v100x4-qwen27b-mtp"].model
    c = model.capacity
    limits = Limits(
        slot_count=c.slot_count,
        batch_tokens=c.batch_tokens,
        context_length=c.context_length,
        page_count=60,
        draft_tokens=c.draft_tokens,
        can_save=True,
    )
    scene = Scene(limits=limits, policy=PRESETS[policy], model=model, seed=5)
    with (tmp_path / "t.jsonl").open("wb") as out:
        simulate(scene, arrivals_of(workload, 5), trace=out)
    return tmp_path / "t.jsonl"


def fold(path: Path, *watchers: Any) -> list[Step]:
    with open_trace(path) as reader:
        run = Fold(reader)
        steps: list[Step] = []
        for step in run:
            for watch in watchers:
                watch(step)
            steps.append(step)
        assert run.verdict().exit_code == 0
        return steps


def scenario_in(path: Path) -> Scenario:
    with open_trace(path) as reader:
        scribe = Scribe(reader.header.limits, reader.header.policy)
    fold(path, scribe.see)
    return scribe.scenario()


def events_of(path: Path) -> list[AnyEvent]:
    return [step.event for step in fold(path)]


@pytest.mark.parametrize("policy", sorted(PRESETS))
def test_a_simulation_is_made_again_as_it_was(tmp_path: Path, policy: str):
    path = simulated(tmp_path, policy)
    cost = ENGINES["v100x4-qwen27b-mtp"].model.cost
    scenario = scenario_in(path)
    assert scenario.prefixes, "the workload has shared prefixes"
    events: list[AnyEvent] = []
    summary_of(scenario, cost, (lambda event, *_: events.append(event),))
    assert events == events_of(path)


@pytest.mark.parametrize("policy", ["barrier-fair", "quantum", "mixed"])
def test_taken_up_in_the_middle_it_repeats_itself(tmp_path: Path, policy: str):
    """Wherever it begins again: with a round in flight, a seat asked for, an answer half done."""
    path = simulated(tmp_path, policy)
    steps = fold(path)
    for seq in range(0, len(steps), len(steps) // 25):
        rerun, events = disturbed(path, (Fault("slow", seq),))
        if rerun.faults:
            continue  # the last round had been: nothing was left to be slow
        assert events == [step.event for step in steps[seq + 1 :]]
        assert rerun.state == steps[-1].after


def disturbed(
    path: Path, faults: tuple[Fault, ...], cost: Any = COST
) -> tuple[Rerun, list[AnyEvent]]:
    with open_trace(path) as reader:
        scribe = Scribe(reader.header.limits, reader.header.policy)
    injection = Injection(scribe, min(fault.seq for fault in faults))
    fold(path, scribe.see, injection.see)
    events: list[AnyEvent] = []
    rerun = injection.rerun(
        scribe.scenario(), cost, faults, (lambda event, *_: events.append(event),)
    )
    rerun.run()
    return rerun, events


@pytest.mark.parametrize("name", ["stop string", "late end", "failing lane", "shutdown", "change"])
def test_small_runs_are_made_again(tmp_path: Path, name: str):
    inputs: tuple[AnyEvent, ...] = (
        call(0, Request(0, 30, output_limit=60), Request(1, 100, output_limit=60)),
    )
    answers: tuple[Answer, ...] = (Answer(0, tokens=7), Answer(1, tokens=9))
    match name:
        case "stop string":
            answers = (Answer(0, tokens=7, stop_after_ns=3 * MS), Answer(1, tokens=9))
        case "late end":
            answers = (Answer(0, tokens=7, is_late=True), Answer(1, tokens=0, is_late=True))
        case "failing lane":
            answers = (Answer(0, tokens=7), Answer(1, fails_at=70))
        case "shutdown":
            inputs = (*inputs, ShutdownRequested(at_ns=200 * MS))
        case _:
            inputs = (*inputs, PolicyChanged(at_ns=170 * MS, policy=PRESETS["quantum"]))
    path = record(tmp_path / "t.jsonl", scenario_of(*inputs, answers=answers))
    again = record(tmp_path / "a.jsonl", scenario_in(path))
    assert again.read_bytes() == path.read_bytes()
    for seq in range(len(fold(path))):
        rerun, events = disturbed(path, (Fault("slow", seq),))
        assert rerun.faults or events == events_of(path)[seq + 1 :]


def test_answers_are_taken_down(tmp_path: Path):
    given = {
        0: Answer(0, tokens=7, stop_after_ns=3 * MS),
        1: Answer(1, tokens=2, is_late=True),
        2: Answer(2),
        3: Answer(3, fails_at=25),
    }
    inputs = (call(0, *(Request(i, 20, output_limit=30) for i in range(4))), cancel(300, 2))
    limits = replace(LIMITS, slot_count=4)
    path = record(
        tmp_path / "t.jsonl", scenario_of(*inputs, limits=limits, answers=tuple(given.values()))
    )
    found = {answer.request_id: answer for answer in scenario_in(path).answers}
    for request_id, answer in given.items():
        seen = replace(found[request_id], slot=None)
        assert seen == answer, request_id
    assert scenario_in(path).cut == 1, "the cancelled one"


def test_a_run_that_was_cut_is_cut_again(tmp_path: Path):
    """Without it an answer without a limit would go on to the end of its context."""
    scenario = scenario_of(call(0, Request(0, 30), Request(1, 30, output_limit=4)))
    path = record(tmp_path / "t.jsonl", scenario)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:40]))
    cut = scenario_in(path)
    assert cut.until_ns == fold(path)[-1].event.at_ns and cut.cut == 1
    events: list[AnyEvent] = []
    summary_of(cut, COST, (lambda event, *_: events.append(event),))
    assert events == events_of(path)
    rerun, events = disturbed(path, (Fault("slow", 20, factor_ppm=3_000_000),))
    assert not rerun.faults and max(event.at_ns for event in events) <= cut.until_ns
    assert scenario_in(record(tmp_path / "w.jsonl")).until_ns is None


def test_a_run_without_end_is_given_up():
    scenario = scenario_of(call(0, Request(0, 30)))
    with pytest.raises(RerunError, match="no end: 500 events"):
        summary_of(scenario, COST, events_max=500)


# --- faults ---------------------------------------------------------------------------------------


def outcomes(path: Path, *faults: Fault) -> dict[int, str]:
    with open_trace(path) as reader:
        scribe = Scribe(reader.header.limits, reader.header.policy)
    first = min(fault.seq for fault in faults)
    injection = Injection(scribe, first)
    found: dict[int, str] = {}

    def note(effects: Any) -> None:
        found.update({e.request_id: e.reason for e in effects if isinstance(e, FinishRequest)})

    def begun(step: Step) -> None:
        if step.seq <= first:
            note(step.effects)

    fold(path, scribe.see, injection.see, begun)
    rerun = injection.rerun(
        scribe.scenario(), COST, faults, (lambda _e, _b, _a, effects: note(effects),)
    )
    rerun.run()
    assert not rerun.faults
    return found


PAIR = scenario_of(call(0, Request(0, 30, output_limit=6), Request(1, 100, output_limit=6)))


def test_a_cancel_hits_one_request(tmp_path: Path):
    path = record(tmp_path / "t.jsonl", PAIR)
    assert outcomes(path, Fault("slow", 4)) == {0: "length", 1: "length"}
    assert outcomes(path, Fault("cancel", 4, request_id=1)) == {0: "length", 1: "cancelled"}


def test_a_failed_round_hits_its_own(tmp_path: Path):
    path = record(tmp_path / "t.jsonl", PAIR)
    _, events = disturbed(path, (Fault("fail", 4),))
    (failed,) = [event for event in events if isinstance(event, RoundFailed)]
    recorded = next(
        e
        for e in events_of(path)
        if isinstance(e, RoundCompleted) and e.round_id == failed.round_id
    )
    assert failed.at_ns == recorded.at_ns, "it fails when it would have ended"
    assert set(outcomes(path, Fault("fail", 4)).values()) == {"failed", "length"}


def test_a_lost_engine_hits_all(tmp_path: Path):
    path = record(tmp_path / "t.jsonl", PAIR)
    assert outcomes(path, Fault("lost", 4)) == {0: "engine_lost", 1: "engine_lost"}


def test_a_slow_round_takes_longer_and_shifts_the_rest(tmp_path: Path):
    path = record(tmp_path / "t.jsonl", PAIR)
    steps = fold(path)
    seq = next(s.seq for s in steps if s.after.flight and s.after.flight.kind == "decode")
    rerun, events = disturbed(path, (Fault("slow", seq, factor_ppm=3_000_000),))
    later = [event.at_ns for event in events]
    recorded = [step.event.at_ns for step in steps[seq + 1 :]]
    assert later == [at_ns + 2 * 20 * MS for at_ns in recorded], "a round of tokens takes 20 ms"
    assert rerun.engine.reused == len(later), "all the same rounds, only later"


def test_several_faults_in_the_order_of_their_places(tmp_path: Path):
    path = record(tmp_path / "t.jsonl", BUSY)
    found = outcomes(path, Fault("lost", 20), Fault("cancel", 7, request_id=0))
    assert found == {0: "cancelled", 1: "length", 2: "engine_lost", 3: "engine_lost"}


def test_a_fault_beyond_the_end_is_left_over(tmp_path: Path):
    path = record(tmp_path / "t.jsonl", PAIR)
    rerun, _ = disturbed(path, (Fault("cancel", 3, request_id=0), Fault("fail", 5000)))
    assert [fault.seq for fault in rerun.faults] == [5000]
    with pytest.raises(FaultError, match="there is no event 6000"):
        disturbed(path, (Fault("fail", 6000),))


def test_faults_are_read():
    assert parse_faults("cancel@5:req:3, fail@7,slow=3x@9,slow=0.5x@10,lost@11") == (
        Fault("cancel", 5, request_id=3),
        Fault("fail", 7),
        Fault("slow", 9, factor_ppm=3_000_000),
        Fault("slow", 10, factor_ppm=500_000),
        Fault("lost", 11),
    )


@pytest.mark.parametrize(
    "text",
    ["", "cancel@5", "cancel@5:req:", "fail", "fail@x", "fail@-1", "slow@3", "slow=x@3", "slow=3@3",
     "slow=-1x@3", "melt@3", "fail@3,", "fail@" + "9" * 19],
)  # fmt: skip
def test_no_faults(text: str):
    with pytest.raises(FaultError, match="is not cancel@SEQ:req:ID"):
        parse_faults(text)


# --- what if --------------------------------------------------------------------------------------


def test_a_change_of_policy(tmp_path: Path):
    change = parse_changes("policy=quantum,tg-quantum-ms=500,max-round-ms=250,slots=3")
    changed = change(PAIR)
    assert changed.policy == replace(PRESETS["quantum"], decode_quantum_ns=500 * MS)
    assert changed.limits == replace(LIMITS, round_ns_max=250 * MS, slot_count=3)
    recorded = replace(PAIR, inputs=(*PAIR.inputs, PolicyChanged(at_ns=9, policy=PRESETS["mixed"])))
    assert change(recorded).inputs == PAIR.inputs, "the policy asked for holds all along"
    assert parse_changes("slots=3")(recorded).inputs == recorded.inputs


def test_a_change_is_felt():
    """Under the barrier the short prompt waits for the long one; without one it does not."""
    scenario = scenario_of(call(0, Request(0, 30, output_limit=6), Request(1, 900, output_limit=6)))
    before = summary_of(scenario, COST)
    after = summary_of(parse_changes("policy=mixed")(scenario), COST)
    assert before.ttft_s.p50 is not None and after.ttft_s.p50 is not None
    assert before.ttft_s.p50 > 0.9 > 0.2 > after.ttft_s.p50
    assert before.finished == after.finished == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not one of policy, serial-order, tg-quantum-ms"),
        ("policy", "policy needs one value"),
        ("policy=fast", "policy=fast is not one of mixed"),
        ("slots=0", r"slots=0 is not a whole number in 1\.\.4096"),
        ("slots=2.5", "slots=2.5 is not a whole number"),
        ("slots=", "slots= is not a whole number"),
        ("slots=2,slots=3", "slots needs one value"),
        ("serial-order=lifo", "serial-order=lifo is not fifo or shortest"),
        ("temperature=1", "'temperature' is not one of"),
    ],
)
def test_no_changes(text: str, message: str):
    with pytest.raises(ChangeError, match=message):
        parse_changes(text)


def test_prompts_that_begin_alike_find_their_cache_elsewhere():
    """In the recorded run the second prompt found the first one's state in slot 0; a changed run
    puts the first one elsewhere, and the second must still find it."""
    inputs = (
        call(0, Request(9, 64, output_limit=50)),
        call(1, Request(10, 60, output_limit=2)),
        call(3000, Request(11, 60, output_limit=2, shared=(Shared(10, 40),))),
    )
    scenario = scenario_of(*inputs)
    found: list[int] = []
    prefixes = scenario_prefixes(scenario)
    made = replace(scenario, prefixes=prefixes)

    def see(event: Any, *_: Any) -> None:
        if getattr(event, "cached_length", 0):
            found.append(event.cached_length)

    summary_of(made, COST, (see,))
    assert found == [40]


def scenario_prefixes(scenario: Scenario) -> Any:
    from phaseloop.sim.replay_prefix import Kin

    kin = Kin()
    for request in requests_of(scenario):
        for shared in request.shared:
            kin.link(shared.request_id, request.request_id, shared.length)
    return kin.prefixes()
