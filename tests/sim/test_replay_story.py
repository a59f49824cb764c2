"""Goal: the story of a request says where it was, since when, why, and who held it, without a gap.

Method: golden texts of small scenarios, and the sums that must hold for any story.
"""

from itertools import pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace
from recordings import BUSY, call, record, scenario_of, shutdown

from phaseloop.core.vocabulary import ClientResumed, ClientStalled, Request
from phaseloop.runtime.trace import open_trace
from phaseloop.sim.replay import Fold
from phaseloop.sim.replay_scenario import Scenario
from phaseloop.sim.replay_story import Story, Storyteller, story_lines

MS = 1_000_000


def story(tmp_path: Path, request_id: int, scenario: Scenario = BUSY) -> Story | None:
    teller = Storyteller(request_id)
    with open_trace(record(tmp_path / "t.jsonl", scenario)) as reader:
        for step in Fold(reader):
            teller.see(step)
    return teller.finished()


def text(tmp_path: Path, request_id: int, scenario: Scenario = BUSY) -> str:
    found = story(tmp_path, request_id, scenario)
    assert found is not None
    return "\n".join(story_lines(found))


def test_a_member_that_waits_at_the_barrier(tmp_path: Path):
    assert text(tmp_path, 0) == (
        "request 0: completion, prompt 30, limit 6\n"
        "0.000000 s  arrives (line 2)\n"
        "0.000000 s  prefilling in slot 0 for 64.0 ms, 1 round\n"
        "    0.000000 s +64.0 ms in_round: the engine works on it now\n"
        "0.064000 s  ready in slot 0 for 76.0 ms, 1 round, 1 token\n"
        "    0.064000 s +66.0 ms barrier: its prompt is done; all generate together once the last "
        "member is ready; held by request 1\n"
        "    0.130000 s +10.0 ms in_round: the engine works on it now\n"
        "0.140000 s  generating in slot 0 for 100.0 ms, 5 rounds, 5 tokens\n"
        "    0.140000 s +100.0 ms in_round: the engine works on it now\n"
        "0.240000 s  ends: length, 6 tokens\n"
        "waited 66.0 ms of 240.0 ms: 66.0 ms barrier"
    )


def test_one_that_waits_for_others_to_drain_and_is_cancelled(tmp_path: Path):
    lines = text(tmp_path, 2).splitlines()
    assert lines[:2] == [
        "request 2: completion, prompt 20, limit 50",
        "0.050000 s  arrives (line 5)",
    ]
    assert lines[2].startswith("0.050000 s  queued for 190.0 ms")
    assert any("cohort_generates" in line and "held by requests 0, 1" in line for line in lines)
    assert lines[-2] == "0.500000 s  ends: cancelled, 10 tokens"


@pytest.mark.parametrize("request_id", [0, 1, 2, 3])
@pytest.mark.parametrize("policy", ["barrier-fair", "quantum", "mixed", "no-cont-batching"])
def test_spans_leave_no_gap(tmp_path: Path, request_id: int, policy: str):
    scenario = scenario_of(*BUSY.inputs, policy=policy, answers=BUSY.answers)
    found = story(tmp_path, request_id, scenario)
    assert found is not None and found.outcome is not None and found.ended_ns is not None
    spans = found.spans
    assert spans[0].since_ns == found.arrived_ns and spans[-1].until_ns == found.ended_ns
    pairs = pairwise(spans)
    assert all(one.until_ns == two.since_ns for one, two in pairs)
    assert sum(span.tokens for span in spans) == found.tokens


def test_children_have_a_story_each(tmp_path: Path):
    scenario = scenario_of(call(0, Request(0, 40, output_limit=3, choices=2)))
    found = story(tmp_path, 0, scenario)
    assert found is not None
    reasons = {(span.choice, span.reason) for span in found.spans}
    assert (1, "children_wait") in reasons
    lines = story_lines(found)
    assert [line for line in lines if line.startswith("choice")] == ["choice 0", "choice 1"]
    assert not any(line.startswith("waited") for line in lines), "whose wait would it be?"


def test_a_client_that_does_not_read_waits_for_itself(tmp_path: Path):
    stalled = ClientStalled(at_ns=130 * MS, request_id=0)
    resumed = ClientResumed(at_ns=400 * MS, request_id=0)
    inputs = (call(0, Request(0, 30, output_limit=20)), stalled, resumed)
    assert "client_stalled" in text(tmp_path, 0, scenario_of(*inputs))


def test_a_refusal_has_an_end_and_no_spans(tmp_path: Path):
    found = story(tmp_path, 0, scenario_of(call(5, Request(0, 5000))))
    assert found is not None and found.spans == [] and found.outcome == "exceeds_context"


def test_a_story_without_an_end_says_so(tmp_path: Path):
    path = record(tmp_path / "t.jsonl")
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:7]))
    teller = Storyteller(1)
    with open_trace(path) as reader:
        for step in Fold(reader):
            teller.see(step)
    found = teller.finished()
    assert found is not None and found.outcome is None
    assert "not ended here" in story_lines(found)[-1]


def test_a_request_that_never_was(tmp_path: Path):
    assert story(tmp_path, 77) is None


def test_many_spans_are_summed_up(tmp_path: Path):
    """One that generates takes turns with a long prompt, under the smallest quanta."""
    inputs = (call(0, Request(0, 30, output_limit=60)), call(100, Request(1, 900, output_limit=4)))
    scenario = scenario_of(*inputs, policy="quantum")
    policy = replace(scenario.policy, decode_quantum_ns=1, prefill_quantum_ns=1)
    lines = text(tmp_path, 0, replace(scenario, policy=policy)).splitlines()
    summed = [line for line in lines if " spans " in line]
    assert [line.split(" spans ")[1].split(":")[0] for line in summed] == [
        "in_round",
        "prefill_slice",
    ]
    assert "held by request 1" in summed[1]


def test_shutdown_is_an_outcome(tmp_path: Path):
    scenario = scenario_of(call(0, Request(0, 30, output_limit=4000)), shutdown(100))
    found = story(tmp_path, 0, scenario)
    assert found is not None and found.outcome == "shutdown"
