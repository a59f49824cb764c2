"""Run every transcript, and then random walks, against whichever core is importable.

`python judge.py` exits 0 where nothing is wrong and 1 with the first thing that is: the transcript
and the invariant, expectation or check it broke.  Golden answers are not compared: a rewrite would
take the fault over into them, but never into expectations and invariants.
"""

import sys

from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from test_walk import Walk, walking
from transcript import play, transcripts
from words import UsageError

WALKS = 60


def judge() -> str | None:
    """What is wrong with this core, if anything."""
    for path in transcripts():
        try:
            played = play(path.read_text())
            if played.failures:
                return f"{path.stem}, expectation: {played.failures[0]}"
            played.run.drain()
        except (AssertionError, UsageError) as fault:
            return f"{path.stem}, {kind(fault)}: {fault}"
    try:
        quick = settings(walking, max_examples=WALKS, phases=(Phase.generate,))
        run_state_machine_as_test(Walk, settings=quick)
    except AssertionError as fault:
        return f"a random walk, {kind(fault)}: {fault}"
    return None


def kind(fault: Exception) -> str:
    return type(fault.__cause__ or fault).__name__


if __name__ == "__main__":
    wrong = judge()
    if wrong is not None:
        sys.stdout.write(wrong + "\n")
        sys.exit(1)
