"""From settings to a model that gives embeddings or ranks; imported late, as serve_model.py is."""

from pathlib import Path

from msgspec.structs import replace

from phaseloop.engine.cpu_load import CpuOptions
from phaseloop.engine.encoder_load import encoder_over
from phaseloop.engine.protocol import limits_of
from phaseloop.engine.snapshots import Snapshots
from phaseloop.model.load import load_model
from phaseloop.model.plan import CONTEXT_STEP
from phaseloop.model.weights import open_weights

from .serve_file import cache_kind, facts_of, load_by, words_of_file
from .serve_loaded import Loaded, Reporter
from .serve_model import planned
from .serve_progress import CheckProgress
from .serve_settings import ROUND_MS_CPU, SLOTS_AUTO, Settings, threads_of


def load(settings: Settings, reporter: Reporter) -> Loaded:
    """Raises UserError, Interrupted."""
    return load_by(load_file, settings, reporter)


def load_file(path: Path, settings: Settings, reporter: Reporter) -> Loaded:
    weights = open_weights(path)
    model = load_model(weights)
    vocabulary = words_of_file(weights, reporter)
    slot_count = settings.slot_count or SLOTS_AUTO
    if model.dimensions.whole_lanes:  # one pass may hold as much as a round
        settings = replace(settings, ubatch=min(settings.batch, model.context_length))
        if not settings.context:  # texts are short, and each may be as long as can be
            settings = replace(settings, context=slot_count * model.context_length)
    cache = cache_kind(settings, reporter)
    sizes = planned(weights, model, settings, cache, slot_count, reporter)
    options = CpuOptions(
        slot_count=slot_count,
        context_length=sizes.sequence,
        batch_tokens=settings.batch,
        ubatch_tokens=min(settings.ubatch, settings.batch),
        threads=threads_of(settings),
        cache=cache,
        attention="fast" if settings.fast_attention else "tiled",
        repack=sizes.repack,
        page_count=max(slot_count, -(-sizes.context // CONTEXT_STEP)),
    )
    with CheckProgress(weights.size_bytes, reporter) as progress:
        engine = encoder_over(weights, model, settings.wanted_pooling, options, progress.at)
    return Loaded(
        engine,
        vocabulary,
        facts_of(path, weights, model),
        ROUND_MS_CPU,
        Snapshots(0),
        limits_of(engine.describe()),
    )
