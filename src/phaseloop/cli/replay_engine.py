"""`phaseloop replay --engine -m MODEL`: the recorded rounds once more, on the model itself."""

import os
import re
from argparse import Namespace
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from phaseloop.engine.cpu_load import CpuOptions, engine_over
from phaseloop.engine.draft_recorded import RecordedDrafts
from phaseloop.engine.protocol import Engine, EngineDied
from phaseloop.engine.sampling import ChainSampler
from phaseloop.engine.settings import POOLINGS
from phaseloop.engine.speculate import Terms
from phaseloop.model.adapter import open_adapter
from phaseloop.model.gguf_file import ModelError
from phaseloop.model.load import load_model
from phaseloop.model.weights import Weights, open_weights
from phaseloop.ops.ggml import AttentionPath
from phaseloop.ops.ggml_regions import CacheKind
from phaseloop.ops.interface import BackendError
from phaseloop.runtime.trace import Header, Reader
from phaseloop.sim.replay import EXIT_DIVERGED, EXIT_OK, Fold
from phaseloop.sim.replay_model import Difference, EngineReplay, MissingContent
from phaseloop.sim.replay_text import count_text
from phaseloop.text.metadata import vocabulary_of
from phaseloop.text.vocabulary import VocabularyError

from .errors import UserError
from .models import by_name
from .replay_files import open_source, write_lines, write_object
from .replay_report import verdict_lines

ENGINE_NAME = re.compile(
    r"ggml-.+-(?P<attention>tiled|rows|fast)-(?P<cache>f16|q8_0)(?P<rest>(-[a-z]+)*)"
)
DIFFERENCES_SHOWN = 10

Report = Callable[[int, int], None]  # done, in all


def run_engine(args: Namespace) -> int:
    """Raises UserError, TraceError or OSError."""
    with ExitStack() as files:
        source = open_source(args.trace, files)
        reader = Reader(args.trace, source)
        header = reader.header
        check_content(args.trace, header)
        most = header.limits.draft_tokens
        drafts = RecordedDrafts(most) if most else None
        engine = loaded(args, header, drafts)
        replay = EngineReplay(engine, drafts)
        fold = Fold(reader, force=args.force, tell=replay.tell)
        size = args.trace.stat().st_size
        try:
            with bar("rounds") as report:
                for step in fold:
                    replay.see(step)
                    report(source.tell(), size)
                    if replay.differences and not args.force:
                        break
        except MissingContent as error:
            what = "its token ids are not in the trace; it was edited, or not made by a server"
            raise UserError(f"{args.trace}, {error}: {what}") from None
        except EngineDied as error:
            raise UserError(f"the engine died: {error}", EXIT_DIVERGED) from None
    exit_code = fold.verdict().exit_code
    if replay.differences:
        exit_code = EXIT_DIVERGED
    if args.json:
        write_object(object_of(engine, replay, exit_code))
        return exit_code
    lines = engine_lines(engine, replay)
    if fold.verdict().exit_code != EXIT_OK or not replay.differences:
        lines += verdict_lines(header, fold.verdict())
    write_lines(lines)
    return exit_code


def check_content(trace: Path, header: Header) -> None:
    if header.content == "counts":
        raise UserError(
            f"--engine: {trace} holds counts, no token ids, so there is nothing to run a model on; "
            "what it holds, the decisions, is replayed without --engine"
        )


def loaded(args: Namespace, header: Header, drafts: RecordedDrafts | None) -> Engine:
    """The engine the trace was made with, as far as the header tells; refused if it is another."""
    if args.model is None:
        raise UserError("--engine wants the model's file, too: -m model.gguf")
    found = ENGINE_NAME.fullmatch(header.engine)
    if found is None:
        raise UserError(f"--engine: {args.trace} was made by {header.engine}, which runs no model")
    if header.engine.rpartition("-")[2] in POOLINGS:
        what = f"{args.trace} is of a server for embeddings, and a trace holds no vectors"
        raise UserError(f"--engine: {what}; the decisions are replayed without --engine")
    limits = header.limits
    options = CpuOptions(
        slot_count=limits.slot_count,
        context_length=limits.context_length,
        batch_tokens=limits.batch_tokens,
        threads=args.threads or len(os.sched_getaffinity(0)),
        cache=cast(CacheKind, found["cache"].upper()),
        attention=cast(AttentionPath, found["attention"]),
        page_count=limits.page_count,
        reuse_generated="-reuse" in found["rest"],
        cache_ram_bytes=header.cache_ram_bytes or 0,
    )
    try:
        weights = open_weights(by_name(str(args.model)))
        check_model(args, header, weights.digest())
        model = load_model(weights)
        adapters = [open_adapter(path, weights, model) for path in args.lora or ()]
        check_adapters(args, header, [one.digest for one in adapters])
        with bar("weights") as report:
            engine = engine_over(
                weights,
                model,
                ChainSampler(),
                options,
                report,
                ends_of(weights),
                drafting=lambda backend: (drafts, Terms(cost=0.0)),
                adapters=adapters,
            )
    except (ModelError, BackendError) as error:
        raise UserError(str(error)) from None
    name = engine.describe().name
    if name != header.engine and not args.force:
        raise UserError(
            f"--engine: {args.trace} was made by {header.engine}, this is {name}; the bits of one "
            "need not be those of the other (--force compares them all the same)"
        )
    return engine


def ends_of(weights: Weights) -> frozenset[int] | None:
    """What ends a text, as the server has it; None where there is no tokenizer to know it."""
    try:
        return frozenset(vocabulary_of(weights.metadata).end_ids)
    except VocabularyError:
        return None


def check_model(args: Namespace, header: Header, digest: str) -> None:
    if digest != header.model and not args.force:
        raise UserError(
            f"--engine: {args.model} is not the model of the trace: its digest is {digest}, the "
            f"trace has {header.model} (--force runs it all the same)"
        )


def check_adapters(args: Namespace, header: Header, digests: list[str]) -> None:
    """Also --force cannot do without them: prompts name them by number."""
    served = header.adapters or ()
    if len(served) != len(digests):
        raise UserError(
            f"--engine: {args.trace} was made with {count_text(len(served), 'adapter')}, and "
            f"{len(digests)} are named; name each with --lora FILE, in the order in which they "
            "were served"
        )
    for number, (one, other) in enumerate(zip(served, digests, strict=True)):
        if one != other and not args.force:
            raise UserError(
                f"--engine: {args.lora[number]} is not adapter {number} of the trace: its digest "
                f"is {other}, the trace has {one} (--force takes it all the same)"
            )


# --- what it says ---------------------------------------------------------------------------------


def engine_lines(engine: Engine, replay: EngineReplay) -> list[str]:
    compared = replay.compared
    skipped = (
        f", {compared.skipped:,} left out that had failed or been aborted"
        if compared.skipped
        else ""
    )
    lines = [
        f"{engine.describe().name}: {count_text(compared.rounds, 'round')} run again{skipped}; "
        f"{count_text(compared.seats, 'seat')}, {count_text(compared.tokens, 'token')} compared"
    ]
    if compared.lost is not None:
        lines.append(f"note: the recorded engine was lost ({compared.lost}); compared up to there")
    if not replay.differences:
        return [*lines, "tokens equal: the engine computes what it did"]
    lines += [f"DIFFERS: {difference_text(one)}" for one in replay.differences[:DIFFERENCES_SHOWN]]
    left = len(replay.differences) - DIFFERENCES_SHOWN
    if left > 0:
        lines.append(f"and {left:,} more answers differ")
    return lines


def difference_text(one: Difference) -> str:
    choice = f", choice {one.choice}" if one.choice else ""
    where = "its seat" if one.round_id is None else f"round {one.round_id}"
    place = f"event {one.seq}, {where}, request {one.request_id}{choice}"
    if one.what == "token":
        place += f", token {one.token} of its answer, at position {one.position}"
    return f"{place}: expected {one.expected}, got {one.got}"


def object_of(engine: Engine, replay: EngineReplay, exit_code: int) -> dict[str, object]:
    return {
        "engine": engine.describe().name,
        "compared": replay.compared,
        "differences": replay.differences,
        "exit_code": exit_code,
    }


@contextmanager
def bar(what: str) -> Generator[Report]:
    """A bar on stderr, if somebody is there to see it."""
    columns = (TextColumn(what), BarColumn(), TextColumn("{task.percentage:.0f} %"))
    console = Console(stderr=True)
    with Progress(
        *columns,
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task(what, total=None)

        def report(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        yield report
