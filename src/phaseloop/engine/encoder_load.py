"""From weights to an engine that gives embeddings or scores on the CPU."""

from collections.abc import Callable

from msgspec.structs import replace

from phaseloop.model.embedding import encoder_of
from phaseloop.model.shape import Model
from phaseloop.model.weights import Weights

from .cpu_load import CpuOptions, backend_over, unstable
from .encoder import EncoderEngine
from .pooling import Pooled
from .settings import Pooling


def encoder_over(
    weights: Weights,
    model: Model,
    pooling: Pooling | None,
    options: CpuOptions,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> EncoderEngine:
    """`pooling` None: as the file says.  Raises ModelError, BackendError."""
    weights.check_values(progress)
    encoder, pooling = encoder_of(model, weights, pooling)
    whole = encoder.dimensions.whole_lanes
    options = replace(options, cache_ram_bytes=0, reuse_generated=False)
    backend = backend_over(weights, encoder, options)
    shares = model.encoding is not None and model.encoding.shares
    return EncoderEngine(
        backend,
        Pooled(pooling, looks_ahead=whole, shares=shares),
        slot_count=options.slot_count,
        context_length=options.context_length or encoder.context_length,
        batch_tokens=options.batch_tokens,
        whole_prompts=whole,
        page_count=options.page_count,
        unstable=unstable(backend, options),
        model_digest=weights.digest(),
    )
