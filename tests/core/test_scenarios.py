"""Every scenario and every rule as a readable script, run against the core and its invariants.

Each file of fixtures/transcripts is one test, named by its id.  It passes if no invariant breaks
in any step, its `expect` lines hold, its golden answers are what the core answers now, a replay of
its events gives the same effects, and afterwards everybody can be seen off.
"""

import re
from pathlib import Path

import msgspec
import pytest
from run import Run
from transcript import play, transcripts

from phaseloop.core.reduce import reduce
from phaseloop.core.state import initial
from phaseloop.core.vocabulary import AnyEvent

WANTED = (
    *(f"F{i}" for i in range(1, 15)),
    *(f"G{i}" for i in range(1, 21)),
    *(f"R{i}" for i in range(1, 19)),
)


@pytest.mark.parametrize("path", transcripts(), ids=lambda path: path.stem)
def test_scenario(path: Path, request: pytest.FixtureRequest) -> None:
    text = path.read_text()
    played = play(text)
    if request.config.getoption("--rewrite", default=False):
        path.write_text(played.text)
        text = played.text
    assert not played.failures, "\n".join(played.failures)
    assert played.text == text, "the answers differ: read the diff, then --rewrite"
    replay(played.run)
    played.run.drain()


def replay(run: Run) -> None:
    """I10 and G20: the events alone, through their wire form, give the same effects again."""
    first = run.shadow.limits
    state = initial(first, run.policy)
    encoded = msgspec.json.encode(run.events)
    for event, effects in zip(
        msgspec.json.decode(encoded, type=list[AnyEvent]), run.effects, strict=True
    ):
        state, again = reduce(state, event)
        assert again == effects
    assert state == run.state


def test_every_scenario_and_rule_has_a_transcript() -> None:
    ids = {path.stem.split("-")[0] for path in transcripts()}
    assert ids >= set(WANTED), sorted(set(WANTED) - ids)


@pytest.mark.parametrize("path", transcripts(), ids=lambda path: path.stem)
def test_transcript_says_what_it_shows(path: Path) -> None:
    """Prose first, and at least one expectation that a rewrite cannot change."""
    lines = path.read_text().splitlines()
    assert re.match(rf"# {path.stem.split('-')[0]}: \S", lines[0]), "begin with `# <id>: ...`"
    assert any(line.startswith("expect ") for line in lines)
