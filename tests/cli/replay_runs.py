"""Small traces, and the command run on them, for the tests of `phaseloop replay`."""

import json
from pathlib import Path
from typing import Any

import pytest

from phaseloop import __version__
from phaseloop.cli.main import main
from phaseloop.core.policy import PRESETS
from phaseloop.core.state import Limits, initial
from phaseloop.core.vocabulary import Request, RequestArrived, RequestCancelled
from phaseloop.engine.sim_cost import Cost
from phaseloop.runtime.digest import core_digest
from phaseloop.runtime.trace import Header, TraceWriter
from phaseloop.sim.replay_scenario import Scenario
from phaseloop.sim.replay_whatif import summary_of

MS = 1_000_000
LIMITS = Limits(slot_count=2, batch_tokens=64, context_length=4096, page_count=64)
COST = Cost(prefill_token_ns=MS, decode_round_ns=20 * MS, sample_lane_ns=5 * MS)


def arrival(at_ms: int, *requests: Request) -> RequestArrived:
    return RequestArrived(at_ns=at_ms * MS, requests=requests)


INPUTS = (
    arrival(0, Request(0, 30, output_limit=6), Request(1, 100, output_limit=6)),
    arrival(50, Request(2, 20, output_limit=50)),
    arrival(60, Request(3, 40, output_limit=9)),
    RequestCancelled(at_ns=500 * MS, request_id=2),
)
SCENARIO = Scenario(LIMITS, PRESETS["barrier-fair"], INPUTS, ())


def record(path: Path, scenario: Scenario = SCENARIO, **header: Any) -> Path:
    fields = {"version": __version__, "core": core_digest(), "engine": "tests"} | header
    head = Header(policy=scenario.policy, limits=scenario.limits, **fields)
    with path.open("wb") as out:
        writer = TraceWriter(out, head, initial(scenario.limits, scenario.policy))
        summary_of(scenario, COST, (writer.append,))
        writer.close("done", 0)
    return path


class Ran:
    """One command line, and what came of it."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *arguments: object) -> None:
        capsys.readouterr()
        self.code = main(["replay", *map(str, arguments)])
        self.out, self.err = capsys.readouterr()

    def object(self) -> dict[str, Any]:
        return json.loads(self.out)


def edit(path: Path, line: int, old: str, new: str) -> Path:
    lines = path.read_text().splitlines(keepends=True)
    assert old in lines[line - 1]
    lines[line - 1] = lines[line - 1].replace(old, new, 1)
    path.write_text("".join(lines))
    return path
