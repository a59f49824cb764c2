"""What drafts are worth on the CPU: answers with and without them, on texts easy and hard to guess.

    python benchmarks/drafts.py MODEL.gguf [--draft SMALLER.gguf] [--threads 2] [--repeats 5]

Each text is continued greedily by 128 tokens, without drafts and with each kind, in turn and again;
rates are medians over the repeats.  The answers must be the same tokens: it stops if they are not.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from phaseloop.core.vocabulary import Lane, LaunchRound, RoundKind, SeatRequest
from phaseloop.engine.cpu import ModelEngine
from phaseloop.engine.cpu_load import CpuOptions, backend_over, engine_over
from phaseloop.engine.draft import Drafter
from phaseloop.engine.draft_cost import draft_cost, row_cost
from phaseloop.engine.draft_model import DraftModel
from phaseloop.engine.draft_ngram import NgramDrafter, Ngrams
from phaseloop.engine.protocol import Content, Outcome
from phaseloop.engine.sampling import ChainSampler
from phaseloop.engine.speculate import Terms
from phaseloop.model.load import load_model
from phaseloop.model.weights import open_weights
from phaseloop.ops.ggml import GgmlBackend
from phaseloop.text.metadata import vocabulary_of
from phaseloop.text.tokenizer import Tokenizer

TOKENS = 128
SIZE_N = 3  # short texts: their last three tokens, not twelve, must have stood before
TABLE = "\n".join(
    f"    Item {n}: apples, pears, plums and cherries from the garden" for n in range(9)
)
TEXTS = {
    "a list that goes on": "The shopping list:\n" + TABLE + "\n    Item 9:",
    "prose": "The old lighthouse keeper had not spoken to anyone since the storm began, and",
}


class Answer(Struct, frozen=True):
    ids: tuple[int, ...]
    seconds: float  # of its decode rounds
    rounds: int
    drafted: int


def answer(engine: ModelEngine, prompt: tuple[int, ...]) -> Answer:
    most = engine.describe().draft_tokens
    number = 0

    def run(kind: RoundKind, start: int, count: int, outputs: int) -> Outcome:
        nonlocal number
        number += 1
        lane = Lane(0, 0, 0, start, count, outputs)
        return engine.run(LaunchRound(number, kind, (lane,), "generate"))

    engine.seat(SeatRequest(0, 0, 0, None, "oldest"), Content(prompt, reuse=False))
    run("prefill", 0, len(prompt), 0)
    ids = list(run("sample", len(prompt), 0, 1).tokens[0])
    rounds = drafted = 0
    begun = time.perf_counter()
    while len(ids) < TOKENS:
        count = 1 + min(most, TOKENS - len(ids) - 1)
        outcome = run("decode", len(prompt) + len(ids) - 1, count, count)
        ids += outcome.tokens[0]
        rounds += 1
        drafted += sum(outcome.drafted)
    seconds = time.perf_counter() - begun
    engine.release(0, 0, 1)
    return Answer(tuple(ids), seconds, rounds, drafted)


def measured(engines: dict[str, ModelEngine], prompt: tuple[int, ...], repeats: int) -> list[str]:
    found: dict[str, list[Answer]] = {kind: [] for kind in engines}
    for _ in range(repeats):
        for kind, engine in engines.items():
            found[kind].append(answer(engine, prompt))
    plain = statistics.median(one.seconds for one in found["without"])
    lines: list[str] = []
    for kind, answers in found.items():
        last = answers[-1]
        if last.ids != found["without"][-1].ids:
            raise SystemExit(f"{kind}: its tokens are not those without drafts")
        seconds = statistics.median(one.seconds for one in answers)
        held = TOKENS - 1 - last.rounds
        share = f"{held} of {last.drafted}" if last.drafted else ""
        rate = (TOKENS - 1) / seconds
        lines.append(f"| {kind} | {rate:.0f} | {plain / seconds:.2f} | {last.rounds} | {share} |")
    return lines


def main() -> None:
    args = parsed()
    weights = open_weights(args.model)
    model = load_model(weights)
    options = CpuOptions(slot_count=1, context_length=1024, threads=args.threads)

    def engine_with(drafting: Callable[[GgmlBackend], tuple[Drafter | None, Terms]]) -> ModelEngine:
        sampler, ends = ChainSampler(), frozenset[int]()
        return engine_over(weights, model, sampler, options, end_tokens=ends, drafting=drafting)

    def ngrams(backend: GgmlBackend) -> tuple[Drafter | None, Terms]:
        return NgramDrafter(Ngrams(size_n=SIZE_N), 1), costing(row_cost(backend))

    def smaller(backend: GgmlBackend) -> tuple[Drafter | None, Terms]:
        draft = load_model(draft_weights := open_weights(args.draft))
        its = backend_over(draft_weights, draft, options)
        drafter = DraftModel(
            its,
            ChainSampler(),
            slot_count=1,
            most=8,
            context_length=1024,
            vocabulary=draft.dimensions.vocabulary,
            target_vocabulary=model.dimensions.vocabulary,
            end_tokens=frozenset(),
        )
        return drafter, costing(row_cost(backend) + draft_cost(backend, its))

    engines = {"without": engine_with(lambda backend: (None, Terms()))}
    engines["ngram-simple"] = engine_with(ngrams)
    if args.draft:
        engines["draft-simple"] = engine_with(smaller)
    tokenizer = Tokenizer(vocabulary_of(weights.metadata))
    for name, text in TEXTS.items():
        say(f"\n{name}\n\n| drafts | tokens/s | times as fast | rounds | held |")
        say("|---|---:|---:|---:|---:|")
        say("\n".join(measured(engines, tokenizer.encode(text), args.repeats)))


def say(line: str) -> None:
    sys.stdout.write(line + "\n")


def costing(cost: float) -> Terms:
    say(f"a draft costs {cost:.2f} of a round without any")
    return Terms(cost=cost)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("model", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
