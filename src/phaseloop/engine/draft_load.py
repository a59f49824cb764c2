"""From a network that reads hidden rows to a drafter on the CPU."""

import numpy as np

from phaseloop.model.draft import Draft
from phaseloop.ops.ggml import GgmlBackend
from phaseloop.ops.interface import Backend

from .cpu_load import CpuOptions
from .draft_cost import pass_seconds
from .draft_dflash import DflashDrafter, drafts_of
from .draft_mtp import MtpDrafter
from .sampler import Sampler


def draft_backend(draft: Draft, options: CpuOptions, context_length: int) -> GgmlBackend:
    """`options` are the target's.  Drafts need no promises about bits, nor copies of weights."""
    return GgmlBackend(
        draft.network,
        draft.tensors,
        draft.dimensions,
        region_count=options.slot_count,
        capacity=context_length,
        threads=options.threads,
        cache=options.cache,
        attention="fast",
        ubatch=options.ubatch_tokens,
        repack=False,
        taps=draft.taps,
    )


def hidden_drafter(
    draft: Draft,
    backend: GgmlBackend,
    sampler: Sampler,
    *,
    slot_count: int,
    context_length: int,
    most: int,
    end_tokens: frozenset[int],
) -> MtpDrafter | DflashDrafter:
    """`backend` is the draft's; the drafter closes it."""
    if draft.kind == "draft-dflash":
        return DflashDrafter(
            backend,
            sampler,
            draft,
            slot_count=slot_count,
            context_length=context_length,
            most=most,
            end_tokens=end_tokens,
        )
    return MtpDrafter(
        backend,
        sampler,
        slot_count=slot_count,
        width=draft.dimensions.given_width,
        most=most,
        vocabulary=draft.dimensions.vocabulary,
        end_tokens=end_tokens,
    )


def hidden_cost(target: Backend, backend: Backend, draft: Draft, most: int) -> float:
    """The time of one draft, as a part of a pass of one row of the target.

    A block costs the same however many of its drafts are used; they are taken to be all.
    """
    plain = pass_seconds(target, 1)
    if draft.kind == "draft-dflash":
        drafts = drafts_of(draft, most)
        return pass_seconds(backend, 1 + drafts) / (drafts * plain) if drafts else 0.0
    given = np.zeros((1, draft.dimensions.given_width), np.float32)
    return pass_seconds(backend, 1, given) / plain
