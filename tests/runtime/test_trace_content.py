"""Goal: a trace of ids or text holds what was asked and answered, and cannot be edited unnoticed.

Method: one run of a scripted engine, whose token n of request r is 1000 r + n, is recorded with
each content and compared line by line; then lines are edited, moved and dropped.
"""

import asyncio
import json
import math
from pathlib import Path

import pytest
from msgspec.structs import replace
from scripted import ScriptedEngine, header_for, verify

from phaseloop.core.policy import PRESETS
from phaseloop.core.state import initial
from phaseloop.core.vocabulary import Request
from phaseloop.engine.protocol import Content, limits_of
from phaseloop.engine.settings import GREEDY, Breaker, Sampling
from phaseloop.runtime.gateway import Submission
from phaseloop.runtime.service import Recording, Service
from phaseloop.runtime.trace import TraceError, TraceWriter, open_trace
from phaseloop.runtime.trace_content import GeneratedLine, PromptLine

UNUSUAL = Sampling(
    samplers=("top_k", "temperature"),
    temperature=0.7,
    dry_breakers=(Breaker(7, (8, 9)),),
    logit_bias=((3, -math.inf), (4, 1.5)),
)
ASKED = (
    Submission(Request(0, 3, output_limit=2), (5, 6, 7), 2**64 - 1, UNUSUAL, "what?"),
    Submission(Request(0, 2, output_limit=2, keep_cache=False), (8, 9), 11, GREEDY, "lone \ud800"),
)


def recorded(path: Path, content: str) -> list[dict]:
    async def main() -> None:
        engine = ScriptedEngine()
        limits, policy = limits_of(engine.describe()), PRESETS["barrier-fair"]
        header = replace(header_for(initial(limits, policy)), content=content)
        with path.open("wb") as out:
            recording = Recording(out, header, pytest.fail)
            async with Service(engine, limits, policy, recording=recording) as service:
                with service.gateway.submit(ASKED) as call:
                    for stream in call.streams:
                        async for _ in stream:
                            pass
                service.shut_down()
                await service.ended()

    asyncio.run(main())
    assert verify(path)
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def of_kind(lines: list[dict], kind: str) -> list[dict]:
    return [line for line in lines if line["line"] == kind]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def test_a_trace_of_counts_holds_neither(path):
    lines = recorded(path, "counts")
    assert {line["line"] for line in lines} == {"header", "event", "checkpoint", "footer"}


def test_a_trace_of_ids_holds_prompts_and_answers_but_no_text(path):
    lines = recorded(path, "ids")
    first, second = of_kind(lines, "prompt")
    assert (first["request_id"], first["tokens"], first["seed"]) == (0, [5, 6, 7], 2**64 - 1)
    assert (second["request_id"], second["tokens"], second["seed"]) == (1, [8, 9], 11)
    assert first["text"] is None and second["text"] is None
    assert "what" not in path.read_text()
    rounds = of_kind(lines, "generated")
    assert [line["ids"] for line in rounds] == [[[0], [1000]], [[1], [1001]]]
    kinds = [line["line"] for line in lines]
    assert kinds[1:4] == ["prompt", "prompt", "event"]
    for at, line in enumerate(lines):
        if line["line"] == "generated":
            assert lines[at + 1]["event"]["round_id"] == line["round_id"]


def test_a_trace_of_text_holds_the_prompts_as_they_came(path):
    first, second = of_kind(recorded(path, "text"), "prompt")
    assert first["text"] == "what?"
    assert second["text"] == "lone \\ud800", "no JSON holds half a character"


def test_settings_come_back_as_they_were(path):
    spelled = of_kind(recorded(path, "ids"), "prompt")[0]["sampling"]
    assert spelled["top_k"] == 40, "also those at their default are stated"
    assert spelled["logit_bias"] == [[3, None], [4, 1.5]]
    with open_trace(path) as reader:
        contents = [one.content() for _, one in reader if isinstance(one, PromptLine)]
    assert contents == [
        Content((5, 6, 7), 2**64 - 1, UNUSUAL),
        Content((8, 9), 11, GREEDY, reuse=False),
    ]


def test_records_come_in_file_order(path):
    recorded(path, "ids")
    with open_trace(path) as reader:
        kinds = [type(one).__name__ for _, one in reader]
    assert kinds[:3] == ["PromptLine", "PromptLine", "Recorded"]
    assert kinds.count("GeneratedLine") == 2


def edited(path: Path, edit) -> TraceError:
    lines = path.read_bytes().splitlines(keepends=True)
    edit(lines)
    path.write_bytes(b"".join(lines))
    with pytest.raises(TraceError) as caught, open_trace(path) as reader:
        for _ in reader:
            pass
    return caught.value


def index_of(lines: list[bytes], kind: bytes) -> int:
    return next(at for at, line in enumerate(lines) if line.startswith(b'{"line":"%b"' % kind))


def changing(kind: bytes, old: bytes, new: bytes):
    def edit(lines: list[bytes]) -> None:
        at = index_of(lines, kind)
        assert old in lines[at]
        lines[at] = lines[at].replace(old, new, 1)

    return edit


def dropping(kind: bytes):
    def edit(lines: list[bytes]) -> None:
        del lines[index_of(lines, kind)]

    return edit


def delaying(kind: bytes):
    """The line changes place with the one after it."""

    def edit(lines: list[bytes]) -> None:
        at = index_of(lines, kind)
        lines[at], lines[at + 1] = lines[at + 1], lines[at]

    return edit


def moving_arrival(lines: list[bytes]) -> None:
    """Behind the first seat."""
    at = index_of(lines, b"event")
    lines[at : at + 2] = [swapped(lines[at + 1], 0), swapped(lines[at], 1)]


def moving_completion(lines: list[bytes]) -> None:
    """The prompts' round seems to end with the first tokens' ids before it."""
    at = index_of(lines, b"generated")
    lines[at - 1 : at + 1] = [lines[at], lines[at - 1]]


def swapped(line: bytes, seq: int) -> bytes:
    fields = json.loads(line)
    fields["seq"], fields["event"]["at_ns"] = seq, 0
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


EDITS = {
    "token": (changing(b"prompt", b"[5,6,7]", b"[5,6,8]"), "chain", "does not follow"),
    "seed": (changing(b"prompt", b"18446744073709551615", b"1"), "chain", "does not follow"),
    "setting": (changing(b"prompt", b'"top_k":40', b'"top_k":41'), "chain", "does not follow"),
    "unknown": (changing(b"prompt", b'"xtc_', b'"xtd_'), "sampling", "xtd_probability is unknown"),
    "type": (
        changing(b"prompt", b'"top_k":40', b'"top_k":"x"'),
        "sampling.top_k",
        "expected `int`",
    ),
    "id": (changing(b"generated", b"[1000]", b"[1001]"), "chain", "does not follow"),
    "round": (changing(b"generated", b'"round_id":1', b'"round_id":2'), "chain", "not follow"),
    "dropped prompt": (dropping(b"prompt"), "chain", "does not follow"),
    "dropped ids": (dropping(b"generated"), "chain", "does not follow"),
    "order": (delaying(b"prompt"), "chain", "does not follow"),
    "later": (delaying(b"generated"), "line", "round 1 stand before it already"),
    "arrival": (moving_arrival, "line", "the prompts before it are of requests [0, 1]"),
    "completion": (moving_completion, "line", "the ids before it are of round 1, which does"),
    "text": (changing(b"prompt", b'"text":null', b'"text":"x"'), "text", "holds no text"),
    "counts": (changing(b"header", b'"ids"', b'"counts"'), "line", "counts holds no such line"),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_is_found_and_named(path, name):
    edit, field, message = EDITS[name]
    recorded(path, "ids")
    error = edited(path, edit)
    assert error.field == field and message in error.message


def test_the_chain_of_events_is_what_it_is_without_these_lines(path):
    header = header_for(initial(limits_of(ScriptedEngine().describe()), PRESETS["quantum"]))
    with path.open("wb") as out:
        writer = TraceWriter(out, header, initial(header.limits, header.policy))
        writer.prompt(0, Content((1, 2)), "x")
        writer.generated(0, ((1,),))
        writer.close("done", 0)
    without = path.read_bytes()
    with path.open("wb") as out:
        TraceWriter(out, header, initial(header.limits, header.policy)).close("done", 0)
    assert path.read_bytes() == without


def test_a_text_too_long_for_a_line_is_left_out(path):
    header = header_for(initial(limits_of(ScriptedEngine().describe()), PRESETS["quantum"]))
    header = replace(header, content="text")
    with path.open("wb") as out:
        writer = TraceWriter(out, header, initial(header.limits, header.policy))
        writer.prompt(0, Content((1, 2)), "x" * (9 << 20))
        writer.flush()
    line = json.loads(path.read_bytes().splitlines()[1])
    assert line["tokens"] == [1, 2] and line["text"] is None


def test_a_round_that_was_to_produce_nothing_has_no_line(path):
    recorded(path, "ids")
    with open_trace(path) as reader:
        rounds = [one.round_id for _, one in reader if isinstance(one, GeneratedLine)]
    assert rounds == [1, 2], "round 0 computed the prompts"
