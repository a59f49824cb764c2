"""Goal: the reducer decides as it did when the traces in fixtures/traces were recorded.

Method: each is replayed, every step twice and held to the invariants.  A failure here is a change
of behaviour.  If it is wanted, `fixtures/traces/record.sh` records them again, and the commit says
which decisions changed, and why.
"""

from pathlib import Path

import pytest

from phaseloop.core.policy import PRESETS
from phaseloop.core.vocabulary import AnyEffect, AnyEvent, LaunchRound
from phaseloop.runtime.trace import open_trace
from phaseloop.sim.replay import Fold, Step, Verdict

FOLDER = Path(__file__).parents[2] / "fixtures" / "traces"
TRACES = sorted(FOLDER.glob("*.jsonl"))
BYTES_MAX = 100_000


def fold(path: Path) -> tuple[Verdict, list[Step]]:
    with open_trace(path) as reader:
        run = Fold(reader, twice=True, check=True)
        steps = list(run)
        return run.verdict(), steps


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_it_decides_as_it_did(path: Path):
    verdict, steps = fold(path)
    assert verdict.divergence is None, "see the head of this file"
    assert verdict.exit_code == 0 and verdict.footer is not None and len(steps) > 20
    assert path.stat().st_size < BYTES_MAX


def test_together_they_cover_the_policies_and_the_kinds_of_rounds():
    policies: set[str] = set()
    events: set[type[AnyEvent]] = set()
    effects: set[type[AnyEffect]] = set()
    kinds: set[str] = set()
    for path in TRACES:
        _, steps = fold(path)
        policies.add(steps[0].before.policy.name)
        for step in steps:
            events.add(type(step.event))
            effects |= {type(effect) for effect in step.effects}
            kinds |= {effect.kind for effect in step.effects if isinstance(effect, LaunchRound)}
    assert policies == set(PRESETS)
    assert kinds >= {"prefill", "encode", "fork", "sample", "decode", "mixed", "save", "restore"}
    assert {kind.__name__ for kind in events} >= {
        "RequestArrived", "RequestSeated", "RoundCompleted", "RoundFailed", "RequestCancelled",
        "ClientStalled", "ClientResumed", "DeadlineReached", "EngineLost",
    }  # fmt: skip
    assert {kind.__name__ for kind in effects} >= {"ReleaseSlot", "Stop"}
