"""Goal: the tally of every replay agrees with the collector, which measures the same run in full.

Method: runs of all kinds are watched by both; sums and worst cases must be equal, and the request
named as the worst must be one that had it.
"""

from itertools import pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace
from recordings import BUSY, LIMITS, call, cancel, crowd, record, scenario_of

from phaseloop.core.policy import PRESETS
from phaseloop.core.vocabulary import DeliverTokens, Request
from phaseloop.runtime.trace import open_trace
from phaseloop.sim.metrics import Collector
from phaseloop.sim.replay import Fold, Step
from phaseloop.sim.replay_scenario import Answer, Scenario
from phaseloop.sim.replay_tally import Tally

CHILDREN = (
    call(0, Request(0, 40, output_limit=9, choices=2)),
    call(90, Request(1, 200, priority=1)),
)
SCENARIOS: dict[str, Scenario] = {
    "crowd": crowd(70),
    "children": scenario_of(*CHILDREN, cancel(2000, 1), policy="quantum"),
    "drafts": scenario_of(
        call(0, Request(0, 30, output_limit=90), Request(1, 40, output_limit=90)),
        limits=replace(LIMITS, draft_tokens=3),
        answers=(Answer(0, accepted=(1, 4, 2)), Answer(1, accepted=(3, 1))),
    ),
    "refused": scenario_of(call(0, Request(0, 9999)), call(1, Request(1, 8, output_limit=1))),
} | {f"busy {name}": replace(BUSY, policy=PRESETS[name]) for name in PRESETS}


def watched(path: Path) -> tuple[Tally, Collector, list[Step]]:
    tally = Tally()
    with open_trace(path) as reader:
        collector = Collector(reader.header.limits, reader.header.policy)
        steps = list(Fold(reader))
    for step in steps:
        tally.see(step)
        collector.observe(step.event, step.before, step.after, step.effects)
    tally.close()
    return tally, collector, steps


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_it_agrees_with_the_collector(tmp_path: Path, name: str):
    tally, collector, steps = watched(record(tmp_path / "t.jsonl", SCENARIOS[name]))
    summary = collector.summary()
    assert tally.requests == summary.requests and tally.unfinished == summary.unfinished
    assert sum(tally.rounds.values()) == summary.rounds
    assert tally.tokens == summary.decode_tokens
    assert sum(tally.phases.values()) == summary.phase_changes
    assert sum(tally.phase_ns.values()) == steps[-1].event.at_ns
    gap_s = None if tally.worst_gap is None else tally.worst_gap.length_ns / 1e9
    assert gap_s == summary.gap_s.max
    if tally.worst_gap is not None:
        worst = tally.worst_gap
        times = delivered(steps, worst.request_id, worst.choice)
        assert worst.length_ns == max(b - a for a, b in pairwise(times))
        assert worst.until_ns in times


def delivered(steps: list[Step], request_id: int, choice: int) -> list[int]:
    return [
        step.event.at_ns
        for step in steps
        for effect in step.effects
        if isinstance(effect, DeliverTokens)
        and any((d.request_id, d.choice) == (request_id, choice) for d in effect.deliveries)
    ]


def test_who_has_no_token_yet_waits_until_the_end(tmp_path: Path):
    path = record(tmp_path / "t.jsonl")
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:7]))
    tally, _, steps = watched(path)
    assert tally.worst_wait is not None and tally.unfinished == 4
    assert tally.worst_wait.length_ns == steps[-1].event.at_ns
