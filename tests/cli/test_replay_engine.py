"""Goal: `replay --engine` finds a model's tokens again, bit for bit, and names the first other one.

Method: a tiny model serves through the real service, with its engine thread, and leaves a trace of
ids; neighbours, several choices, a cancel and a cache hit are in it.  The trace is replayed on an
engine that was loaded anew; then edited ids, another model and what a user may forget.
"""

import asyncio
import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf")
pytest.importorskip("ggml")

from msgspec.structs import replace
from replay_runs import Ran
from synthetic import VOCABULARY, decoder_file

from phaseloop import __version__
from phaseloop.cli.main import main
from phaseloop.core.policy import PRESETS
from phaseloop.core.vocabulary import Request
from phaseloop.engine.cpu_load import CpuOptions, load_cpu_engine
from phaseloop.engine.protocol import limits_of
from phaseloop.engine.sampling import ChainSampler
from phaseloop.engine.settings import GREEDY, Sampling
from phaseloop.runtime.digest import core_digest
from phaseloop.runtime.gateway import Submission
from phaseloop.runtime.service import Recording, Service
from phaseloop.runtime.trace import Header
from phaseloop.runtime.trace_content import GeneratedLine, chain_after

RANDOM = np.random.default_rng(3)
PROMPT = tuple(RANDOM.integers(0, VOCABULARY, 90).tolist())
WARM = Sampling(temperature=1.5, top_k=0, top_p=1.0, min_p=0.0)
OPTIONS = CpuOptions(slot_count=3, context_length=512, batch_tokens=64, cache_ram_bytes=64 << 20)


def asked(length: int, seed: int, sampling: Sampling = WARM, **fields: int) -> Submission:
    fields = {"output_limit": 6} | fields
    return Submission(Request(0, length, **fields), PROMPT[:length], seed, sampling)


def stranger(seed: int) -> Submission:
    """Takes a slot from whoever was there before."""
    tokens = tuple(np.random.default_rng(seed).integers(0, VOCABULARY, 100).tolist())
    return Submission(Request(0, 100, output_limit=2), tokens, seed, WARM)


async def serve(model: Path, trace: Path, policy: str, content: str = "ids") -> None:
    """Company, one that finds a cache, one whose client leaves at once, one that finds host RAM."""
    engine, _ = load_cpu_engine(model, ChainSampler(), OPTIONS)
    limits = replace(limits_of(engine.describe()), round_ns_max=0)
    header = Header(
        version=__version__,
        core=core_digest(),
        policy=PRESETS[policy],
        limits=limits,
        engine=engine.describe().name,
        model=engine.describe().model,
        content=content,
        cache_ram_bytes=engine.describe().cache_ram_bytes,
    )
    with trace.open("wb") as out:
        recording = Recording(out, header, pytest.fail)
        async with Service(engine, limits, PRESETS[policy], recording=recording) as service:
            company = [asked(80, 1), asked(33, 2, GREEDY), asked(7, 3), asked(20, 4, choices=2)]
            with service.gateway.submit(company) as call:
                await asyncio.gather(*(drained(stream) for stream in call.streams))
            with service.gateway.submit([asked(90, 5)]) as call:
                await drained(call.streams[0])
            with service.gateway.submit([asked(60, 6, output_limit=300)]) as call:
                await anext(call.streams[0])
            with service.gateway.submit([stranger(seed) for seed in range(3)]) as call:
                await asyncio.gather(*(drained(stream) for stream in call.streams))
            with service.gateway.submit([asked(90, 7)]) as call:
                await drained(call.streams[0])
            service.shut_down()
            await service.ended()


async def drained(stream) -> None:
    async for _ in stream:
        pass


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return decoder_file("llama", "Q4_0").write(folder / "tiny.gguf")


@pytest.fixture(scope="module")
def recorded(model, tmp_path_factory) -> bytes:
    trace = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    asyncio.run(serve(model, trace, "barrier-fair"))
    return trace.read_bytes()


@pytest.fixture
def trace(recorded, tmp_path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(recorded)
    return path


@pytest.mark.parametrize("policy", ["barrier-fair", "quantum", "mixed"])
def test_the_same_engine_computes_the_same_tokens(model, tmp_path, capsys, policy):
    trace = tmp_path / "trace.jsonl"
    asyncio.run(serve(model, trace, policy))
    ran = Ran(capsys, "--engine", "-m", model, trace, "--json", "--threads", 1)
    found = ran.object()
    assert (ran.code, found["differences"]) == (0, [])
    lines = [json.loads(line) for line in trace.read_bytes().splitlines()]
    ids = [one for line in lines if line["line"] == "generated" for one in line["ids"]]
    assert found["compared"]["tokens"] == sum(map(len, ids)) > 30
    assert found["compared"]["requests"] == 10
    seats = [line for line in lines if line.get("event", {}).get("event") == "RequestSeated"]
    assert found["compared"]["seats"] == len(seats) == 11, "one request has two choices"
    found_here = [seat for seat in seats if seat["event"]["cached_length"]]
    assert any(not seat["event"]["restore"] for seat in found_here), "a slot's cache was found"
    assert any(seat["event"]["restore"] for seat in found_here), "and one in host RAM"


def test_it_says_so_to_people(model, trace, capsys):
    ran = Ran(capsys, "--engine", "-m", model, trace)
    assert ran.code == 0 and ran.err == ""
    assert "tokens equal: the engine computes what it did" in ran.out
    assert "chain equal" in ran.out


def test_a_terminal_sees_how_far_it_is(model, trace, monkeypatch):
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    assert main(["replay", "--engine", "-m", str(model), str(trace)]) == 0, screen.getvalue()
    assert "weights" in screen.getvalue() and "rounds" in screen.getvalue()
    assert "100 %" in screen.getvalue()


class Screen(io.StringIO):
    """A terminal that can be read afterwards."""

    def isatty(self) -> bool:
        return True


def content_lines(trace: Path) -> list[tuple[int, dict]]:
    """(index, fields) of the lines that hold prompts or ids."""
    lines = [json.loads(line) for line in trace.read_bytes().splitlines()]
    return [(at, line) for at, line in enumerate(lines) if line["line"] in ("prompt", "generated")]


def with_another_last_id(trace: Path) -> tuple[int, int, int]:
    """Change the last round's first id, and mend its chain: (round, what was there, what is)."""
    (_, before), (at, last) = content_lines(trace)[-2:]
    old = last["ids"][0][0]
    new = (old + 1) % VOCABULARY
    made = GeneratedLine(last["round_id"], ((new,),), "")
    last |= {"ids": [[new]], "chain": chain_after(before["chain"], made)}
    lines = trace.read_bytes().splitlines()
    lines[at] = json.dumps(last, separators=(",", ":")).encode()
    trace.write_bytes(b"\n".join(lines) + b"\n")
    return last["round_id"], old, new


def test_the_first_difference_is_named(model, trace, capsys):
    round_id, old, new = with_another_last_id(trace)
    ran = Ran(capsys, "--engine", "-m", model, trace)
    assert ran.code == 1
    assert f"round {round_id}, request 9, token 5 of its answer, at position 95" in ran.out
    assert f"expected {new}, got {old}" in ran.out
    assert "chain equal" not in ran.out


def test_an_edited_id_is_found_before_anything_runs(model, trace, capsys):
    text = trace.read_text()
    at = text.index('"line":"generated"')
    trace.write_text(text[:at] + text[at:].replace('"ids":[[', '"ids":[[1,', 1))
    ran = Ran(capsys, "--engine", "-m", model, trace)
    assert ran.code == 2 and "field chain: does not follow" in ran.err


def test_a_trace_without_its_ids_is_refused(model, trace, capsys):
    lines = trace.read_bytes().splitlines(keepends=True)
    del lines[content_lines(trace)[-1][0]]
    trace.write_bytes(b"".join(lines))
    ran = Ran(capsys, "--engine", "-m", model, trace)
    assert ran.code == 2 and "its token ids are not in the trace" in ran.err


def test_another_model_is_refused_unless_forced(trace, tmp_path, capsys):
    other = decoder_file("llama", "Q4_0", seed=1).write(tmp_path / "other.gguf")
    ran = Ran(capsys, "--engine", "-m", other, trace)
    assert ran.code == 2 and "is not the model of the trace" in ran.err
    forced = Ran(capsys, "--engine", "-m", other, trace, "--force", "--json")
    assert forced.code == 1
    differing = {one["request_id"] for one in forced.object()["differences"]}
    assert differing >= {0, 1, 2, 3, 4, 9}, "all but those that hardly began"


def test_a_trace_of_another_engine_is_refused(model, trace, capsys):
    text = trace.read_text()
    trace.write_text(text.replace('"engine":"ggml-', '"engine":"sim-', 1))
    ran = Ran(capsys, "--engine", "-m", model, trace)
    assert ran.code == 2 and "which runs no model" in ran.err
    trace.write_text(text.replace('"engine":"ggml-', '"engine":"ggml-0.0.1-', 1))
    ran = Ran(capsys, "--engine", "-m", model, trace, "--force")
    assert ran.code == 2 and "field chain" in ran.err, "the header is part of the chain"


def test_what_is_missing_is_said(model, trace, tmp_path, capsys):
    ran = Ran(capsys, "--engine", trace)
    assert ran.code == 2 and "-m model.gguf" in ran.err
    ran = Ran(capsys, "--engine", "-m", tmp_path / "none.gguf", trace)
    assert ran.code == 2 and "none.gguf: no such file" in ran.err
    ran = Ran(capsys, "-t", 0, trace)
    assert ran.code == 2 and "--threads goes with --engine" in ran.err
    ran = Ran(capsys, "-m", model, trace)
    assert ran.code == 2 and "--model goes with --engine" in ran.err
    ran = Ran(capsys, "--engine", "-m", model, "-t", 0, trace)
    assert ran.code == 2 and "--threads 0: must be at least 1" in ran.err


def test_a_trace_of_ids_replays_and_redacts_like_any_other(trace, tmp_path, capsys):
    assert "chain equal" in Ran(capsys, trace, "--check", "--twice").out
    shared = tmp_path / "shared.jsonl"
    ran = Ran(capsys, trace, "--redact", shared)
    assert ran.code == 0 and "token ids, seeds and sampling settings" in ran.out
    kinds = {json.loads(line)["line"] for line in shared.read_bytes().splitlines()}
    assert kinds == {"header", "event", "checkpoint", "footer"}
    assert Ran(capsys, shared).code == 0
    assert Ran(capsys, "--diff", shared, trace).code == 0, "the decisions are the same"
