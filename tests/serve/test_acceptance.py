"""Goal: over HTTP, the behaviour for which the reference policy was accepted on its own hardware.

Method: two prompts of about 6,000 and 3,000 tokens arrive together, a third while they generate;
without drafts, and with, as it was accepted there.  The clients are real; what happened when is
read from the server's own trace, where order is exact.
"""

import asyncio
from pathlib import Path

import msgspec
import pytest
from draft_files import knowing_file
from letters import letters_file, with_letters
from msgspec import Struct

from phaseloop.cli.child import ChildServer
from phaseloop.cli.client import Exchange
from phaseloop.core.reduce import reduce
from phaseloop.core.state import initial
from phaseloop.core.vocabulary import (
    DeliverTokens,
    FinishRequest,
    LaunchRound,
    RequestArrived,
    RoundCompleted,
)
from phaseloop.runtime.trace import Recorded, open_trace

LONG, SHORT, LATE = 0, 1, 2
TIMEOUT_S = 900

# The third has to arrive before they are done: within a second of simulated time, or of real work.
OUTPUT_SIMULATED, OUTPUT_REAL = 200, 40
SIMULATED = ("--sim", "v100x4-qwen27b", "--sim-speed", "10")
DRAFTING = ("--sim", "v100x4-qwen27b-mtp", "--sim-speed", "10")
OUTPUT_TINY = 600  # a tiny model is fast, so it has more to say, of shorter prompts
LETTERS = {LONG: "a" * 6000, SHORT: "b" * 3000, LATE: "c" * 400}  # the sim's tokens are bytes
TINY = {LONG: "abcd" * 190, SHORT: "efgh" * 95, LATE: "ijkl" * 12}
WORDS = {LONG: "salt " * 6000, SHORT: "iron " * 3000, LATE: "wood " * 400}


class Step(Struct):
    """What happened at one event of the trace."""

    arrived: tuple[int, ...]
    launched: LaunchRound | None
    delivered: tuple[int, ...]
    finished: tuple[int, ...]
    verified: tuple[tuple[int, int], ...] = ()  # requests and how many drafts were verified


async def answer(
    server: ChildServer, prompts: list[str], output: int, begun: asyncio.Event
) -> list[int]:
    """How many tokens of each came; sets `begun` at the first."""
    body = {"prompt": prompts, "n_predict": output, "ignore_eos": True, "stream": True}
    tokens = [0] * len(prompts)
    async with Exchange(server.address, "POST", "/completion", body) as exchange:
        assert exchange.status == 200, await exchange.body()
        async for event in exchange.events():
            assert b'"error"' not in event.data, event.data
            if b'"stop":false' in event.data:
                begun.set()
                tokens[msgspec.json.decode(event.data)["index"]] += 1
    return tokens


async def run(arguments: tuple[str, ...], prompts: dict[int, str], output: int) -> list[int]:
    """The first two in one call: so they arrive together, however fast the engine is."""
    async with ChildServer(arguments) as server:
        begun = asyncio.Event()
        pair = asyncio.create_task(answer(server, [prompts[LONG], prompts[SHORT]], output, begun))
        await begun.wait()
        late = await answer(server, [prompts[LATE]], output, asyncio.Event())
        return [*await pair, *late]


def steps(path: Path) -> list[Step]:
    with open_trace(path) as reader:
        state = initial(reader.header.limits, reader.header.policy)
        found: list[Step] = []
        for _, record in reader:
            if not isinstance(record, Recorded):
                continue
            event, flight = record.event, state.flight
            state, effects = reduce(state, event)
            here = Step((), None, (), ())
            if isinstance(event, RoundCompleted) and flight is not None:
                here.verified = tuple(
                    (lane.request_id, event.drafts(place, lane))
                    for place, lane in enumerate(flight.lanes)
                )
            if isinstance(event, RequestArrived):
                here.arrived = tuple(request.request_id for request in event.requests)
            for effect in effects:
                match effect:
                    case LaunchRound():
                        here.launched = effect
                    case DeliverTokens():
                        here.delivered += tuple(d.request_id for d in effect.deliveries)
                    case FinishRequest():
                        here.finished += (effect.request_id,)
                    case _:
                        pass
            found.append(here)
        return found


def carriers(found: list[Step], request_id: int, *kinds: str) -> list[int]:
    """The steps that launched a round of these kinds with rows of a request."""
    return [
        index
        for index, step in enumerate(found)
        if step.launched is not None
        and step.launched.kind in kinds
        and any(lane.request_id == request_id for lane in step.launched.lanes)
    ]


def accept(
    arguments: tuple[str, ...],
    prompts: dict[int, str],
    output: int,
    trace: Path,
    *,
    drafts: bool = False,
) -> None:
    counts = asyncio.run(run((*arguments, "--trace", str(trace)), prompts, output))
    assert counts == [output] * 3
    found = steps(trace)
    prompt_rounds = {one: carriers(found, one, "prefill") for one in prompts}
    token_rounds = {one: carriers(found, one, "sample", "decode") for one in prompts}
    assert len(prompt_rounds[LONG]) >= 3 and len(prompt_rounds[SHORT]) >= 2, "several rounds each"
    assert set(prompt_rounds[LONG]) & set(prompt_rounds[SHORT]), "together, as one cohort"
    last_prompt = max(prompt_rounds[LONG] + prompt_rounds[SHORT])
    first_token = min(token_rounds[LONG] + token_rounds[SHORT])
    assert last_prompt < first_token, "no token from either before both are done"
    opened = found[first_token].launched
    assert opened is not None and opened.kind == "sample"
    assert {lane.request_id for lane in opened.lanes} == {LONG, SHORT}, "all first tokens at once"
    late = next(index for index, step in enumerate(found) if LATE in step.arrived)
    drained = max(i for i, step in enumerate(found) if {LONG, SHORT} & set(step.finished))
    assert first_token < late < drained, "the third arrives while the cohort generates"
    assert min(prompt_rounds[LATE]) >= drained, "and processes nothing until it has drained"
    assert not [step for step in found if step.launched and step.launched.kind == "mixed"]
    for request_id in (LONG, SHORT):
        verified = sum(count for step in found for who, count in step.verified if who == request_id)
        assert (verified > 0) == drafts


@pytest.mark.timeout(60)
def test_on_the_simulated_engine(tmp_path: Path):
    accept(SIMULATED, LETTERS, OUTPUT_SIMULATED, tmp_path / "trace.jsonl")


@pytest.mark.timeout(60)
def test_on_the_simulated_engine_with_drafts(tmp_path: Path):
    accept(DRAFTING, LETTERS, OUTPUT_SIMULATED, tmp_path / "trace.jsonl", drafts=True)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["ngram-simple", "draft-simple"])
def test_on_a_tiny_model_with_drafts(tmp_path: Path, kind: str):
    """Rounds of 128 tokens.  A model that drafts for itself is not worth it, unless it is free."""
    pytest.importorskip("ggml")
    path = letters_file(tmp_path / "letters.gguf", context=4096)
    more = ("--spec-type", kind, "--spec-ngram-size-n", "1", "--spec-ngram-size-m", "3")
    if kind == "draft-simple":
        more += ("-md", str(path), "--draft-cost", "0")
    size = ("-c", "12288", "-b", "128", "-t", "1", "--cache-ram", "0")
    trace = tmp_path / "trace.jsonl"
    accept(("-m", str(path), *size, *more), TINY, OUTPUT_TINY, trace, drafts=True)


@pytest.mark.timeout(120)
def test_on_a_tiny_hybrid_with_its_own_block(tmp_path: Path):
    """Multi-token prediction, as it was accepted there; hidden rows are read in prefill rounds."""
    pytest.importorskip("ggml")
    file = with_letters(knowing_file("token"))
    file.metadata["context_length"] = 4096
    path = file.write(tmp_path / "hybrid.gguf")
    size = ("-c", "12288", "-b", "128", "-t", "1", "--cache-ram", "0")
    more = ("--spec-type", "draft-mtp", "--draft-cost", "0")
    trace = tmp_path / "trace.jsonl"
    accept(("-m", str(path), *size, *more), TINY, OUTPUT_TINY, trace, drafts=True)


@pytest.mark.grid
@pytest.mark.timeout(TIMEOUT_S)
def test_on_a_real_model_with_drafts(tmp_path: Path, smollm2: Path):
    """As the reference was accepted: 64 tokens each.  Drafts are made whether they pay or not."""
    arguments = ("-m", str(smollm2), "-c", "16384", "--cache-ram", "0")
    sizes = ("--spec-ngram-size-n", "1", "--spec-ngram-size-m", "3")  # a word that came before
    more = ("--spec-type", "ngram-simple", *sizes, "--draft-cost", "0")
    accept((*arguments, *more), WORDS, 64, tmp_path / "trace.jsonl", drafts=True)


@pytest.mark.grid
@pytest.mark.timeout(TIMEOUT_S)
def test_on_a_real_model(tmp_path: Path, smollm2: Path):
    arguments = ("-m", str(smollm2), "-c", "16384", "--cache-ram", "0")
    accept(arguments, WORDS, OUTPUT_REAL, tmp_path / "trace.jsonl")
