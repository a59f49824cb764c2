"""Goal: docs/trace-format.md describes the traces that are written today, field by field.

Method: its tables are compared with the records, its example is folded and written again, and its
commands and its program run on that example.
"""

import re
import shutil
import subprocess
import sys
from argparse import ArgumentParser
from io import BytesIO
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from msgspec.structs import fields, replace
from pages import DOCS, block, table, with_block

from phaseloop import __version__
from phaseloop.cli.replay import add_arguments
from phaseloop.core import vocabulary
from phaseloop.core.reduce import reduce
from phaseloop.core.state import Limits, initial
from phaseloop.core.vocabulary import AnyEvent, Candidate, Policy, Request, Shared
from phaseloop.runtime import trace
from phaseloop.runtime.digest import core_digest
from phaseloop.runtime.trace import CheckpointLine, EventLine, Footer, Header, TraceWriter
from phaseloop.runtime.trace_content import GeneratedLine, PromptLine
from phaseloop.sim import replay
from phaseloop.sim.replay_story import Storyteller, story_lines

PATH = DOCS / "trace-format.md"
PAGE = PATH.read_text()
EVENTS = get_args(AnyEvent)
RECORDS = (
    Header,
    EventLine,
    PromptLine,
    GeneratedLine,
    CheckpointLine,
    Footer,
    *EVENTS,
    Candidate,
    Shared,
    Request,
    Policy,
    Limits,
)
WITH_DEFAULTS = (Request, Policy, Limits)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_every_field_is_documented(record):
    rows = table(PAGE, f"fields of {record.__name__}")
    names = [field.encode_name for field in fields(record)]
    if record in EVENTS:
        assert names[-1] == "at_ns", "the page says that it comes last"
        names = names[:-1]
    assert [row[0].strip("`") for row in rows] == names


def test_no_record_is_documented_that_does_not_exist():
    documented = re.findall(r"<!-- tests/docs: fields of (\w+) -->", PAGE)
    assert sorted(documented) == sorted(record.__name__ for record in RECORDS)
    section = PAGE.split("## Events")[1].split("\n## ")[0]
    assert sorted(re.findall(r"^### (\w+)$", section, re.MULTILINE)) == sorted(
        event.__name__ for event in EVENTS
    )


@pytest.mark.parametrize("record", WITH_DEFAULTS, ids=lambda record: record.__name__)
def test_defaults_are_those_of_the_records(record):
    for row, field in zip(table(PAGE, f"fields of {record.__name__}"), fields(record), strict=True):
        required = field.required
        default = "" if required else msgspec.json.encode(field.default).decode()
        assert row[2].strip("`") == default, field.name


@pytest.mark.parametrize("name", ["share", "switch", "serial_order"])
def test_every_value_is_spelled_out(name):
    row = next(row for row in table(PAGE, "fields of Policy") if row[0] == f"`{name}`")
    field = next(field for field in fields(Policy) if field.name == name)
    assert tuple(re.findall(r"`(\w+)`", row[3])) == get_args(field.type)


def test_constants_are_those_of_the_code():
    prose = " ".join(PAGE.split())
    assert f"`format` is {trace.FORMAT}." in prose
    assert f"After every {trace.CHECKPOINT_EVENTS}th event" in prose
    assert f"whenever {trace.FLUSH_BYTES >> 10} KiB are pending" in prose
    known = (
        replay.EXIT_OK,
        replay.EXIT_DIVERGED,
        replay.EXIT_UNREADABLE,
        replay.EXIT_OTHER_SOURCES,
    )
    assert [int(row[0]) for row in table(PAGE, "exit codes")] == sorted(known)


def test_every_option_of_replay_is_documented():
    parser = ArgumentParser(add_help=False)
    add_arguments(parser)
    options = set(re.findall(r"--[a-z][\w-]*", parser.format_help()))
    section = PAGE.split("## Replay")[1].split("\n## ")[0]
    assert options == set(re.findall(r"--[a-z][\w-]*", section))


# --- the example ----------------------------------------------------------------------------------


def test_the_example_is_what_would_be_written_today(request):
    """With --rewrite, which tests/core brings along, the page is brought up to date instead."""
    lines = block(PAGE, "example").encode().splitlines()
    header = msgspec.json.decode(lines[0], type=Header)
    rewrite = request.config.getoption("--rewrite", default=False)
    if rewrite:
        header = replace(header, core=core_digest(), version=__version__)
    written = written_again(header, lines[1:])
    story = told(lines[1:], header)
    if rewrite:
        PATH.write_text(with_block(with_block(PAGE, "example", written), "story", story))
        return
    assert block(PAGE, "example") == written
    assert block(PAGE, "story") == story


def written_again(header: Header, lines: list[bytes]) -> str:
    out = BytesIO()
    state = initial(header.limits, header.policy)
    writer = TraceWriter(out, header, state)
    for event in events_of(lines):
        after, effects = reduce(state, event)
        writer.append(event, state, after, effects)
        state = after
    footer = msgspec.json.decode(lines[-1], type=Footer)
    writer.close(footer.reason, footer.exit_code)
    return out.getvalue().decode()


def told(lines: list[bytes], header: Header) -> str:
    """What --why says of request 0."""
    teller = Storyteller(0)
    state = initial(header.limits, header.policy)
    for seq, event in enumerate(events_of(lines)):
        after, effects = reduce(state, event)
        teller.see(replay.Step(seq + 2, seq, event, state, after, effects))
        state = after
    story = teller.finished()
    assert story is not None
    return "".join(f"{line}\n" for line in story_lines(story))


def events_of(lines: list[bytes]) -> list[vocabulary.AnyEvent]:
    records = [msgspec.json.decode(line) for line in lines]
    return [msgspec.convert(r["event"], AnyEvent) for r in records if r["line"] == "event"]


@pytest.fixture
def example(tmp_path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text(block(PAGE, "example"))
    return path


def test_the_example_replays(example):
    with trace.open_trace(example) as reader:
        fold = replay.Fold(reader, twice=True, check=True)
        steps = list(fold)
        verdict = fold.verdict()
    assert verdict.exit_code == replay.EXIT_OK
    assert verdict.divergence is None and verdict.state_notes == ()
    assert verdict.footer is not None and verdict.footer.events == len(steps) > 0


def test_a_bad_line_is_reported_as_the_page_says(example):
    said = re.search(
        r"`(trace\.jsonl, line (\d+), field event\.at_ns: .*?)`", " ".join(PAGE.split())
    )
    assert said is not None
    lines = example.read_bytes().splitlines(keepends=True)
    line = int(said[2]) - 1
    lines[line] = re.sub(rb'"at_ns":\d+', b'"at_ns":5', lines[line])
    example.write_bytes(b"".join(lines))
    with trace.open_trace(example) as reader, pytest.raises(trace.TraceError) as raised:
        list(reader)
    assert str(raised.value) == f"{example.parent}/{said[1]}"


def test_the_program_runs(example):
    done = subprocess.run(
        [sys.executable, "-c", block(PAGE, "python")],
        cwd=example.parent, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "sample   barrier_opened" in done.stdout


@pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")
def test_the_commands_for_jq_run(example):
    done = subprocess.run(
        ["sh", "-e", "-c", block(PAGE, "jq")],
        cwd=example.parent, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "5 RoundCompleted" in done.stdout
    assert "[0.2,600]" in done.stdout
    assert done.stdout.endswith("532\n")
