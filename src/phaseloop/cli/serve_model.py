"""From settings to a loaded model on the CPU; imported late, as it needs numpy, gguf and ggml."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from phaseloop.engine.cpu_load import CpuOptions, engine_over
from phaseloop.engine.protocol import limits_of
from phaseloop.engine.sampling import ChainSampler
from phaseloop.engine.slot_file import Directory
from phaseloop.engine.snapshots import budget_bytes
from phaseloop.http.adapters import Lora
from phaseloop.model.adapter import LoadedAdapter, open_adapter
from phaseloop.model.plan import (
    CONTEXT_STEP,
    Plan,
    available_memory,
    plan_memory,
    size,
    with_drafter,
)
from phaseloop.model.shape import Model
from phaseloop.model.weights import Weights

from .errors import UserError
from .serve_draft import Draft, draft_tokens, drafter_of, open_draft
from .serve_file import CONTEXT_MIN, CacheKind, cache_kind, facts_of, load_by, opened
from .serve_loaded import Loaded, Reporter
from .serve_progress import CheckProgress
from .serve_settings import ROUND_MS_CPU, SLOTS_AUTO, Settings, threads_of


class Sizes(Struct, frozen=True):
    """What the memory plan decided.  Tokens."""

    context: int  # of all sequences
    sequence: int  # of one
    repack: bool


def load(settings: Settings, reporter: Reporter) -> Loaded:
    """Raises UserError, Interrupted."""
    return load_by(load_file, settings, reporter)


def load_file(path: Path, settings: Settings, reporter: Reporter) -> Loaded:
    instead = "which cannot generate; serve it with --embeddings"
    weights, model, vocabulary = opened(path, settings, reporter, instead=instead)
    draft = open_draft(settings, weights, model, vocabulary)
    cache = cache_kind(settings, reporter)
    slot_count = settings.slot_count or SLOTS_AUTO
    adapters = [open_adapter(Path(name), weights, model) for name, _ in settings.lora]
    tell_adapters(adapters, reporter)
    adapters_bytes = sum(one.adapter.size_bytes for one in adapters)
    sizes = planned(weights, model, settings, cache, slot_count, reporter, draft, adapters_bytes)
    options = CpuOptions(
        slot_count=slot_count,
        context_length=sizes.sequence,
        batch_tokens=settings.batch,
        ubatch_tokens=min(settings.ubatch, settings.batch),
        threads=threads_of(settings),
        cache=cache,
        attention="fast" if settings.fast_attention else "tiled",
        repack=sizes.repack,
        reuse_generated=settings.reuse_generated,
        cache_ram_bytes=budget_bytes(settings.cache_ram),
        page_count=-(-sizes.context // CONTEXT_STEP),
    )
    ends = frozenset(vocabulary.end_ids)
    with CheckProgress(weights.size_bytes, reporter) as progress:
        engine = engine_over(
            weights,
            model,
            ChainSampler(),
            options,
            progress.at,
            ends,
            drafting=partial(drafter_of, settings, draft, model, options, ends, reporter),
            taps=() if draft is None else draft.taps,
            adapters=adapters,
        )
    saved = settings.slot_save_path
    return Loaded(
        engine,
        vocabulary,
        facts_of(path, weights, model),
        ROUND_MS_CPU,
        engine.snapshots,
        limits_of(engine.describe()),
        engine.positions,
        None if saved is None else Directory(Path(saved), engine.origin),
        tuple(Lora(str(one.path), one.task_name, one.prompt_prefix) for one in adapters),
    )


def tell_adapters(adapters: Sequence[LoadedAdapter], reporter: Reporter) -> None:
    for number, one in enumerate(adapters):
        count, bytes_ = len(one.adapter.parts()), one.adapter.size_bytes
        reporter.say("adapter", id=number, file=str(one.path), matrices=count, size=size(bytes_))


def planned(
    weights: Weights,
    model: Model,
    settings: Settings,
    cache: CacheKind,
    slot_count: int,
    reporter: Reporter,
    draft: Draft | None = None,
    adapters_bytes: int = 0,
) -> Sizes:
    """A context that fits into memory: the stated one, or as much of the trained one as does."""

    repack = settings.repack

    def plan_of(weights: Weights, model: Model, context: int, drafts: int = 0) -> Plan:
        return plan_memory(
            weights,
            model,
            context=context,
            cache=cache,
            slot_count=slot_count,
            ubatch=settings.ubatch,
            available_bytes=available_memory(),
            repack=repack,
            draft_tokens=drafts,
        )

    def plan(context: int) -> Plan:
        found = plan_of(weights, model, context, draft_tokens(settings))
        found = replace(found, adapters_bytes=adapters_bytes)
        if draft is None:
            return found
        return with_drafter(found, plan_of(draft.weights, draft.model, context))

    wanted = settings.context or model.context_length
    found = plan(wanted)
    if repack and not found.fits:
        repack, found = False, plan(wanted)  # copies are for speed alone
        reporter.warn("weights", repacked=False, why="their copies do not fit into memory")
    if not found.fits:
        fitting = found.context_that_fits()
        if fitting < CONTEXT_MIN:
            raise UserError(f"{weights.path}: {found.describe()}: too little; free some memory")
        if settings.context:
            raise UserError(f"-c {wanted} does not fit: {found.describe()}; -c {fitting} would fit")
        reporter.warn("context", tokens=fitting, trained=wanted, why="no more fits into memory")
        found = plan(fitting)
    if settings.context > model.context_length:
        reporter.warn(
            "context",
            tokens=settings.context,
            why=f"one sequence gets {model.context_length} of them, as the model was trained for",
        )
    reporter.say("memory", plan=found.describe())
    return Sizes(found.context, found.sequence, repack)
