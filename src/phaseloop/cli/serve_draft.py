"""From settings to whoever drafts; imported late, as it needs what a model needs."""

from pathlib import Path

from msgspec import Struct

from phaseloop.engine.cpu_load import CpuOptions, backend_over
from phaseloop.engine.draft import Drafter
from phaseloop.engine.draft_cost import draft_cost, row_cost
from phaseloop.engine.draft_model import DraftModel
from phaseloop.engine.draft_ngram import NgramDrafter, Ngrams
from phaseloop.engine.draft_several import Drafters
from phaseloop.engine.sampling import ChainSampler
from phaseloop.engine.speculate import Terms
from phaseloop.model.load import load_model
from phaseloop.model.shape import Model
from phaseloop.model.weights import Weights, open_weights
from phaseloop.ops.interface import Backend
from phaseloop.text.metadata import vocabulary_of
from phaseloop.text.same_vocabulary import difference
from phaseloop.text.vocabulary import Vocabulary, VocabularyError

from .errors import UserError
from .models import resolve
from .serve_settings import Settings


class Draft(Struct, frozen=True):
    """A model that drafts: its file and what it computes."""

    weights: Weights
    model: Model


def open_draft(settings: Settings, target: Vocabulary) -> Draft | None:
    """The draft model, if one is named.  Raises UserError, ModelError."""
    if not settings.has_draft_model:
        return None
    path = resolve(
        settings.model_draft,
        settings.hf_repo_draft,
        None,
        settings.offline,
        settings.hf_token,
    )
    weights = open_weights(path)
    check_vocabulary(path, weights, target)
    return Draft(weights, load_model(weights))


def check_vocabulary(path: Path, weights: Weights, target: Vocabulary) -> None:
    try:
        found = difference(target, vocabulary_of(weights.metadata))
    except VocabularyError as error:
        raise UserError(f"{path}: {error}") from None
    if found is not None:
        raise UserError(
            f"-md {path}: it cannot draft for this model: {found}; take a smaller model of the "
            "same family, or --spec-type ngram-simple, which needs none"
        )


def drafter_of(
    settings: Settings,
    draft: Draft | None,
    model: Model,
    options: CpuOptions,
    end_tokens: frozenset[int],
    target: Backend,
) -> tuple[Drafter | None, Terms]:
    """Who drafts, and on what terms; None if nobody does.  `options` are the target's."""
    drafters: list[Drafter] = []
    cost = row_cost(target) if settings.drafters else 0.0
    for kind in settings.drafters:
        if kind == "ngram-simple":
            drafters.append(NgramDrafter(ngrams_of(settings), options.slot_count))
        if kind == "draft-simple" and draft is not None:
            draft.weights.check_values()
            backend = backend_over(draft.weights, draft.model, options)
            cost += draft_cost(target, backend)
            drafters.append(model_drafter(settings, draft, backend, model, options, end_tokens))
    if not drafters:
        return None, Terms()
    if settings.draft_cost is not None:
        cost = settings.draft_cost
    terms = Terms(settings.draft_n_min, settings.draft_p_min, cost)
    return (drafters[0] if len(drafters) == 1 else Drafters(drafters)), terms


def ngrams_of(settings: Settings) -> Ngrams:
    return Ngrams(settings.ngram_size_n, settings.ngram_size_m, settings.ngram_min_hits)


def model_drafter(
    settings: Settings,
    draft: Draft,
    backend: Backend,
    target: Model,
    options: CpuOptions,
    end_tokens: frozenset[int],
) -> DraftModel:
    context = options.context_length or target.context_length
    return DraftModel(
        backend,
        ChainSampler(),
        slot_count=options.slot_count,
        most=settings.draft_n_max,
        context_length=min(context, draft.model.context_length),
        vocabulary=draft.model.dimensions.vocabulary,
        target_vocabulary=target.dimensions.vocabulary,
        end_tokens=end_tokens,
    )
