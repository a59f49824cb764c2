"""From a model file to an engine on the CPU."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from msgspec import Struct

from phaseloop.model.adapter import LoadedAdapter
from phaseloop.model.load import load_model
from phaseloop.model.plan import state_bytes
from phaseloop.model.shape import Model
from phaseloop.model.weights import Weights, open_weights
from phaseloop.ops.delta_states import MARKS_MAX
from phaseloop.ops.ggml import AttentionPath, GgmlBackend
from phaseloop.ops.ggml_regions import CacheKind
from phaseloop.ops.interface import Tap

from .cpu import ModelEngine
from .draft import Drafter
from .reuse import STEP, states_per_slot
from .sampler import Sampler
from .snapshots import Snapshots
from .speculate import USUAL, Terms

Drafting: TypeAlias = Callable[[GgmlBackend], tuple[Drafter | None, Terms]]
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


class CpuOptions(Struct, frozen=True):
    """What an operator decides.  Tokens for lengths; `page_count` None means no shared limit."""

    slot_count: int = 4
    context_length: int | None = None  # of one sequence; None: what the model was trained for
    batch_tokens: int = 2048
    ubatch_tokens: int = 512
    threads: int = 1
    cache: CacheKind = "F16"
    attention: AttentionPath = "tiled"
    repack: bool = True  # copies of weights, for ggml's wider kernels, where bits allow it
    reuse_generated: bool = False
    cache_ram_bytes: int = 0  # of prefixes that slots had to give up; 0 keeps none
    page_count: int | None = None
    states_max: int = MARKS_MAX  # recurrent states kept per slot, of a model that has some
    state_step: int = STEP  # tokens of a prompt from one of them to the next


def load_cpu_engine(
    path: Path,
    sampler: Sampler,
    options: CpuOptions,
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    end_tokens: frozenset[int] | None = None,
) -> tuple[ModelEngine, Weights]:
    """The engine, and the weights whose metadata describe the tokenizer.

    `end_tokens` end a text, as the tokenizer knows them; without it, those that the file names by
    id.  Raises ModelError for the file, BackendError for what the machine cannot do.
    """
    weights = open_weights(path)
    engine = engine_over(weights, load_model(weights), sampler, options, progress, end_tokens)
    return engine, weights


def backend_over(
    weights: Weights,
    model: Model,
    options: CpuOptions,
    taps: Sequence[Tap] = (),
    adapters: Sequence[LoadedAdapter] = (),
) -> GgmlBackend:
    """`taps`: where a drafter wants to see hidden rows."""
    return GgmlBackend(
        model.network,
        weights.tensors,
        model.dimensions,
        region_count=options.slot_count,
        capacity=options.context_length or model.context_length,
        threads=options.threads,
        cache=options.cache,
        attention=options.attention,
        ubatch=options.ubatch_tokens,
        repack=options.repack,
        marks_max=states_per_slot(
            state_bytes(model.dimensions),
            options.slot_count,
            options.cache_ram_bytes,
            options.states_max,
        ),
        taps=taps,
        adapters=[one.adapter for one in adapters],
    )


def engine_over(
    weights: Weights,
    model: Model,
    sampler: Sampler,
    options: CpuOptions,
    progress: Callable[[int, int], None] = lambda done, total: None,
    end_tokens: frozenset[int] | None = None,
    backend: GgmlBackend | None = None,
    drafting: Drafting = lambda backend: (None, USUAL),
    taps: Sequence[Tap] = (),
    adapters: Sequence[LoadedAdapter] = (),
) -> ModelEngine:
    """As load_cpu_engine, for whoever has looked at the weights before, or made the backend.

    `drafting` is asked, once the backend is there, who drafts for it and on what terms; a drafter
    has a place for each slot.  `taps`: where it wants to see hidden rows.  `adapters` are those of
    the backend, if there is one.
    """
    weights.check_values(progress)
    if backend is None:
        backend = backend_over(weights, model, options, taps, adapters)
    drafter, terms = drafting(backend)
    return ModelEngine(
        backend,
        sampler,
        slot_count=options.slot_count,
        context_length=options.context_length or model.context_length,
        batch_tokens=options.batch_tokens,
        end_tokens=named_ends(weights, model) if end_tokens is None else end_tokens,
        reuse_generated=options.reuse_generated or backend.generated_like_prompt,
        model_digest=weights.digest(),
        page_count=options.page_count,
        snapshots=Snapshots(options.cache_ram_bytes),
        unstable=unstable(backend, options),
        state_step=options.state_step,
        drafter=drafter,
        terms=terms,
        adapter_digests=tuple(one.digest for one in adapters),
    )


def named_ends(weights: Weights, model: Model) -> frozenset[int]:
    keys = [f"tokenizer.ggml.{key}" for key in END_KEYS]
    last = model.dimensions.vocabulary - 1
    return frozenset(weights.count(key, 0, last) for key in keys if key in weights.metadata)


def unstable(backend: GgmlBackend, options: CpuOptions) -> tuple[str, ...]:
    """What P3 cannot be promised for, as Description has it."""
    reasons = [f"{kind} weights" for kind in backend.unstable_kinds]
    if options.attention == "fast":
        reasons.append("fast attention")
    if options.reuse_generated and not backend.generated_like_prompt:
        reasons.append("reuse of generated tokens")
    return tuple(reasons)
