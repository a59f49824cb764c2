"""Goal: a run shrinks to the least that shows a fault, and becomes a test that shows it, too.

Method: faults are planted in runs full of other things; what is left is compared with what was
planted, and every single removal is tried.
"""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from recordings import COST, call, crowd, record, scenario_of

from phaseloop.core.policy import PRESETS
from phaseloop.core.vocabulary import (
    Candidate,
    EngineLost,
    PolicyChanged,
    Request,
    RequestArrived,
    RequestCancelled,
    Shared,
    StopMatched,
)
from phaseloop.runtime.trace import open_trace
from phaseloop.sim.replay import Fold
from phaseloop.sim.replay_figures import figures_of
from phaseloop.sim.replay_predicate import parse_predicate
from phaseloop.sim.replay_scenario import Answer, Scenario
from phaseloop.sim.replay_shrink import Shrinker, requests_of
from phaseloop.sim.replay_snippet import snippet
from phaseloop.sim.replay_whatif import summary_of


def shrunk(scenario: Scenario, text: str, tries: int = 5000) -> tuple[Shrinker, bool]:
    names = tuple(figures_of(summary_of(scenario, COST)))
    shrinker = Shrinker(scenario, COST, parse_predicate(text, names), tries)
    assert shrinker.shows(scenario)
    return shrinker, shrinker.shrink()


def test_a_planted_fault_is_all_that_is_left():
    """Of thirty calls one matters: a long prompt, and a short one that waits for it."""
    noise = [call(i * 500, Request(3 * i, 12 + i % 5, output_limit=4)) for i in range(30)]
    noise[17] = call(
        17 * 500, Request(51, 700, output_limit=4, priority=2), Request(52, 9, output_limit=4)
    )
    shrinker, is_minimal = shrunk(scenario_of(*noise), "barrier_wait_max_ms > 300")
    assert is_minimal
    (least,) = shrinker.scenario.inputs
    assert isinstance(least, RequestArrived) and least.at_ns == 0
    one, two = least.requests
    # 301 ms of waiting are 301 tokens alone, after a round of 64 that both share.
    assert one.prompt_length + two.prompt_length == 301 + 64
    assert (one, two) == (
        Request(0, one.prompt_length, output_limit=0),
        Request(1, two.prompt_length, output_limit=1),
    )
    assert figures_of(shrinker.summary())["barrier_wait_max_ms"] == 301


def test_nothing_more_can_be_spared():
    """Each single removal, and each number one smaller, no longer shows the fault."""
    scenario = replace(crowd(25, spacing_ms=15), answers=(Answer(3, tokens=2, is_late=True),))
    text = "queue_wait_max_ms > 150 and finished > 3"
    shrinker, is_minimal = shrunk(scenario, text)
    assert is_minimal
    least = shrinker.scenario
    for index in range(len(least.inputs)):
        inputs = least.inputs[:index] + least.inputs[index + 1 :]
        assert not shrinker.shows(replace(least, inputs=inputs))
    for event in least.inputs:
        assert not isinstance(event, RequestCancelled)
    assert all(
        answer == Answer(answer.request_id, tokens=answer.tokens) for answer in least.answers
    )


def test_the_tries_are_bounded():
    shrinker, is_minimal = shrunk(crowd(25, spacing_ms=15), "queue_wait_max_ms > 150", tries=20)
    assert not is_minimal and shrinker.tries == 20
    assert figures_of(shrinker.summary())["queue_wait_max_ms"] > 150


def test_requests_keep_what_points_into_them():
    request = Request(
        1,
        100,
        output_limit=2,
        stop_points=(50, 99),
        candidates=(Candidate("slot", 0, 0, 90),),
        shared=(Shared(0, 80),),
    )
    scenario = scenario_of(call(0, Request(0, 90, output_limit=2), request))
    shrinker, _ = shrunk(scenario, "requests == 2")
    for least in requests_of(shrinker.scenario):
        assert least.prompt_length == 1 and least.stop_points == () and least.shared == ()


def test_a_snippet_is_a_test_that_fails_while_the_fault_is_there():
    shrinker, _ = shrunk(crowd(25, spacing_ms=15), "queue_wait_max_ms > 150")
    source = snippet(shrinker.scenario, COST, "queue_wait_max_ms > 150", "t.jsonl")
    names: dict[str, Any] = {}
    exec(compile(source, "snippet", "exec"), names)
    assert names["SCENARIO"] == shrinker.scenario and names["COST"] == COST
    with pytest.raises(AssertionError):
        names["test_shrunk"]()
    healed = source.replace("> 150", "> 15000")
    exec(compile(healed, "snippet", "exec"), names)
    names["test_shrunk"]()
    assert max(map(len, source.splitlines())) <= 100


def test_a_snippet_holds_every_kind_of_value():
    inputs = (
        call(0, Request(0, 9, output_limit=3, candidates=(Candidate("slot", 0, 1, 4),))),
        EngineLost(at_ns=5, reason='said "no" \\ twice'),
        PolicyChanged(at_ns=6, policy=PRESETS["quantum"]),
        StopMatched(at_ns=7, request_id=0),
    )
    answers = (Answer(0, tokens=3, accepted=tuple(range(60)), stop_after_ns=1),)
    scenario = scenario_of(*inputs, answers=answers)
    names: dict[str, Any] = {}
    exec(snippet(scenario, COST, "rounds > 0", "t.jsonl"), names)
    assert names["SCENARIO"] == scenario


def test_a_shrunk_run_has_a_trace_that_replays(tmp_path: Path):
    shrinker, _ = shrunk(crowd(25, spacing_ms=15), "queue_wait_max_ms > 150")
    with open_trace(record(tmp_path / "t.jsonl", shrinker.scenario)) as reader:
        fold = Fold(reader)
        assert len(list(fold)) == shrinker.summary().events
        assert fold.verdict().exit_code == 0
