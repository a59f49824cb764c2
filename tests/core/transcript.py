"""Golden transcripts: a readable script of events, what the core answered, what had to be true.

A transcript is a text file.  Lines that begin in the first column are written by people:

    # prose                      what the scenario shows, and which rule it holds to
    given POLICY limits          once, first: the policy and the engine's limits
    <command>                    one or more events (words.py lists the commands)
    expect <fact>                must be true of the run up to here (expectations.py)

Indented lines below a command are the core's answer.  `--rewrite` writes them anew and leaves all
else as it is, so an expectation can only be changed by hand.
"""

from pathlib import Path

from expectations import holds
from msgspec import Struct
from run import Run
from words import UsageError, begin, command

TRANSCRIPTS = Path(__file__).parents[2] / "fixtures" / "transcripts"
INDENT = "  "


class Played(Struct, frozen=True):
    """What came of a transcript: its text as it should be now, and what was not true."""

    text: str
    failures: tuple[str, ...]
    run: Run


def transcripts() -> list[Path]:
    return sorted(TRANSCRIPTS.glob("*.txt"))


def play(text: str) -> Played:
    """Run a transcript.  Raises UsageError for a line that is none, AssertionError for a fault."""
    lines: list[str] = []
    failures: list[str] = []
    run: Run | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith(INDENT):
            continue  # an answer: written below, from what happens now
        lines.append(line)
        word = line.split(maxsplit=1)[0] if line.strip() else "#"
        if word.startswith("#"):
            continue
        try:
            if word == "given":
                run = begin(line)
            elif run is None:
                raise UsageError("the first line that is no comment must begin with `given`")
            elif word == "expect":
                failures += [f"line {number}: {line}: {why}" for why in holds(run, line)]
            else:
                lines += [INDENT + answer for answer in command(run, line)]
        except UsageError as usage:
            raise UsageError(f"line {number}: {line}: {usage}") from None
        except AssertionError as fault:
            raise AssertionError(f"line {number}: {line}: {fault}") from fault
    if run is None:
        raise UsageError("a transcript without `given`")
    return Played("\n".join(lines) + "\n", tuple(failures), run)
