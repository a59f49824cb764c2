"""Small traces for the tests of replay: scripted calls, an engine with simple costs."""

from pathlib import Path
from typing import Any

from phaseloop.core.policy import PRESETS
from phaseloop.core.state import Limits, initial
from phaseloop.core.vocabulary import (
    AnyEvent,
    Request,
    RequestArrived,
    RequestCancelled,
    ShutdownRequested,
)
from phaseloop.engine.sim_cost import Cost
from phaseloop.runtime.digest import core_digest
from phaseloop.runtime.trace import Header, TraceWriter
from phaseloop.sim.replay_scenario import Answer, Scenario
from phaseloop.sim.replay_whatif import summary_of

MS = 1_000_000
# Ten tokens of a prompt take 10 ms, a round of tokens takes 20 ms.
COST = Cost(prefill_token_ns=MS, decode_round_ns=20 * MS, sample_lane_ns=5 * MS)
LIMITS = Limits(slot_count=2, batch_tokens=64, context_length=4096, page_count=64)


def call(at_ms: int, *requests: Request) -> RequestArrived:
    return RequestArrived(at_ns=at_ms * MS, requests=requests)


def cancel(at_ms: int, request_id: int) -> RequestCancelled:
    return RequestCancelled(at_ns=at_ms * MS, request_id=request_id)


def shutdown(at_ms: int) -> ShutdownRequested:
    return ShutdownRequested(at_ns=at_ms * MS)


def scenario_of(
    *inputs: AnyEvent,
    policy: str = "barrier-fair",
    limits: Limits = LIMITS,
    answers: tuple[Answer, ...] = (),
) -> Scenario:
    return Scenario(limits, PRESETS[policy], inputs, answers)


# Two prompts meet at the barrier, a third waits for them to drain and is cancelled, a fourth ends.
BUSY = scenario_of(
    call(0, Request(0, 30, output_limit=6), Request(1, 100, output_limit=6)),
    call(50, Request(2, 20, output_limit=50)),
    call(60, Request(3, 40, output_limit=9, priority=1)),
    cancel(500, 2),
    answers=(Answer(3, tokens=4),),
)


def record(path: Path, scenario: Scenario = BUSY, cost: Cost = COST, **header: Any) -> Path:
    """Run the scenario and write its trace."""
    fields = {"version": "0", "core": core_digest(), "engine": "tests"} | header
    head = Header(policy=scenario.policy, limits=scenario.limits, **fields)
    with path.open("wb") as out:
        writer = TraceWriter(out, head, initial(scenario.limits, scenario.policy))
        summary_of(scenario, cost, (writer.append,))
        writer.close("done", 0)
    return path


def crowd(count: int, policy: str = "barrier-fair", spacing_ms: int = 40) -> Scenario:
    """Many small calls, enough for several checkpoints."""
    return scenario_of(
        *(
            call(i * spacing_ms, Request(i, 10 + i % 7, output_limit=3 + i % 5))
            for i in range(count)
        ),
        policy=policy,
    )


def edit(path: Path, line: int, old: str, new: str) -> Path:
    """Replace a text that must occur once in a line (counted from 1)."""
    lines = path.read_text().splitlines(keepends=True)
    assert lines[line - 1].count(old) == 1, lines[line - 1]
    lines[line - 1] = lines[line - 1].replace(old, new)
    path.write_text("".join(lines))
    return path
