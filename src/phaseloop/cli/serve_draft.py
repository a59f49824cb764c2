"""From settings to whoever drafts; imported late, as it needs what a model needs."""

from pathlib import Path

from msgspec import Struct

from phaseloop.engine.cpu_load import CpuOptions, backend_over
from phaseloop.engine.draft import Drafter
from phaseloop.engine.draft_cost import draft_cost, row_cost
from phaseloop.engine.draft_load import draft_backend, hidden_cost, hidden_drafter
from phaseloop.engine.draft_model import DraftModel
from phaseloop.engine.draft_ngram import NgramDrafter, Ngrams
from phaseloop.engine.draft_several import Drafters
from phaseloop.engine.sampling import ChainSampler
from phaseloop.engine.speculate import Terms
from phaseloop.model.draft import Draft as HiddenDraft
from phaseloop.model.drafts import draft_from, own_draft
from phaseloop.model.load import load_model
from phaseloop.model.shape import Model
from phaseloop.model.weights import Weights, open_weights
from phaseloop.ops.interface import Backend, Tap
from phaseloop.text.metadata import vocabulary_of
from phaseloop.text.same_vocabulary import difference
from phaseloop.text.vocabulary import Vocabulary, VocabularyError

from .errors import UserError
from .models import resolve
from .serve_loaded import Reporter
from .serve_settings import Settings


class Draft(Struct, frozen=True):
    """A model that drafts: its file and what it computes.

    `hidden` is there where it reads the target's hidden rows; `weights` are empty where it is a
    block in the target's file.
    """

    weights: Weights
    model: Model
    hidden: HiddenDraft | None = None

    @property
    def kind(self) -> str:
        return "draft-simple" if self.hidden is None else self.hidden.kind

    @property
    def taps(self) -> tuple[Tap, ...]:
        return () if self.hidden is None else self.hidden.taps


def open_draft(
    settings: Settings, target: Weights, target_model: Model, vocabulary: Vocabulary
) -> Draft | None:
    """The model that drafts, or the block, if one is wanted.  Raises UserError, ModelError."""
    wanted = [kind for kind in settings.drafters if kind.startswith("draft-")]
    if not wanted:
        return None
    if len(wanted) > 1:
        raise UserError(f"--spec-type {','.join(wanted)}: only one model can draft; name one")
    if settings.has_draft_model:
        draft = open_file(settings, target, target_model, vocabulary)
    else:
        draft = open_block(target, target_model)
    if draft.kind not in wanted and settings.spec_type:
        raise UserError(
            f"--spec-type {','.join(wanted)}: {draft.weights.path} is for {draft.kind}; say that, "
            "or leave --spec-type out"
        )
    return draft


def open_block(target: Weights, target_model: Model) -> Draft:
    hidden = own_draft(target)
    if hidden is None:
        raise UserError(
            f"--spec-type draft-mtp: {target.path} has no block for multi-token prediction; take a "
            "file with one, name one by -md, or use --spec-type ngram-simple"
        )
    return Draft(Weights(target.path, {}, {}), model_of(hidden, target_model), hidden)


def model_of(hidden: HiddenDraft, target: Model) -> Model:
    return Model(hidden.kind, hidden.network, hidden.dimensions, target.context_length)


def open_file(
    settings: Settings, target: Weights, target_model: Model, vocabulary: Vocabulary
) -> Draft:
    path = resolve(
        settings.model_draft,
        settings.hf_repo_draft,
        None,
        settings.offline,
        settings.hf_token,
    )
    weights = open_weights(path)
    hidden = draft_from(weights, target)
    if hidden is None or "tokenizer.ggml.tokens" in weights.metadata:
        check_vocabulary(path, weights, vocabulary)
    if hidden is None:
        return Draft(weights, load_model(weights))
    return Draft(weights, model_of(hidden, target_model), hidden)


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
    reporter: Reporter,
    target: Backend,
) -> tuple[Drafter | None, Terms]:
    """Who drafts, and on what terms; None if nobody does.  `options` are the target's."""
    drafters: list[Drafter] = []
    cost = row_cost(target) if settings.drafters else 0.0
    for kind in settings.drafters:
        if kind == "ngram-simple":
            drafters.append(NgramDrafter(ngrams_of(settings), options.slot_count))
        elif draft is not None:
            draft.weights.check_values()
            found, own_cost = drafting_model(settings, draft, model, options, end_tokens, target)
            cost += own_cost
            drafters.append(found)
    if not drafters:
        return None, Terms()
    if settings.draft_cost is not None:
        cost = settings.draft_cost
    terms = Terms(settings.draft_n_min, settings.draft_p_min, cost)
    drafter = drafters[0] if len(drafters) == 1 else Drafters(drafters)
    reporter.say("drafts", by=drafter.name, most=drafter.most, cost=round(cost, 3))
    return drafter, terms


def drafting_model(
    settings: Settings,
    draft: Draft,
    model: Model,
    options: CpuOptions,
    end_tokens: frozenset[int],
    target: Backend,
) -> tuple[Drafter, float]:
    """The drafter, and the time of one draft as a part of a pass of one row of the target."""
    if draft.hidden is None:
        backend = backend_over(draft.weights, draft.model, options)
        cost = draft_cost(target, backend)
        return model_drafter(settings, draft, backend, model, options, end_tokens), cost
    context = options.context_length or model.context_length
    backend = draft_backend(draft.hidden, options, context)
    drafter = hidden_drafter(
        draft.hidden,
        backend,
        ChainSampler(),
        slot_count=options.slot_count,
        context_length=context,
        most=settings.draft_n_max,
        end_tokens=end_tokens,
    )
    return drafter, hidden_cost(target, backend, draft.hidden, settings.draft_n_max)


def draft_tokens(settings: Settings) -> int:
    """The most drafts of a lane."""
    sizes = {"ngram-simple": settings.ngram_size_m}
    return max((sizes.get(kind, settings.draft_n_max) for kind in settings.drafters), default=0)


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
