"""What the loaders of models have in common; needs no library that computes."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from phaseloop.model.gguf_file import ModelError
from phaseloop.model.load import load_model
from phaseloop.model.shape import Model
from phaseloop.model.weights import Weights, open_weights
from phaseloop.ops.interface import BackendError
from phaseloop.text.metadata import vocabulary_of
from phaseloop.text.vocabulary import Vocabulary, VocabularyError

from .errors import UserError
from .models import resolve
from .serve_loaded import Facts, Loaded, Reporter
from .serve_settings import Settings

CacheKind: TypeAlias = Literal["F16", "Q8_0"]
Read: TypeAlias = Callable[[Path, Settings, Reporter], Loaded]
CONTEXT_MIN = 256  # tokens; with less nothing can be said
CACHE_KINDS: dict[str, CacheKind] = {
    "f32": "F16",  # the best there is
    "f16": "F16",
    "bf16": "F16",
    "q8_0": "Q8_0",
    "q5_1": "Q8_0",
    "q5_0": "Q8_0",
    "q4_1": "Q8_0",
    "q4_0": "Q8_0",
    "iq4_nl": "Q8_0",
}


def load_by(read: Read, settings: Settings, reporter: Reporter) -> Loaded:
    """As `read` loads a file, its errors being a user's."""
    path = resolve(
        settings.model, settings.hf_repo, settings.hf_file, settings.offline, settings.hf_token
    )
    try:
        return read(path, settings, reporter)
    except (ModelError, BackendError) as error:
        raise UserError(str(error)) from None
    except VocabularyError as error:
        raise UserError(f"{path}: {error}") from None


def opened(
    path: Path, settings: Settings, reporter: Reporter, *, instead: str
) -> tuple[Weights, Model, Vocabulary]:
    """A model that generates; `instead` is what to do with an encoder."""
    weights = open_weights(path)
    model = load_model(weights)
    if not model.generates:
        raise UserError(f"{path}: an encoder, {instead}")
    if settings.context_shift and model.dimensions.recurrence is not None:
        why = "nothing can be dropped from recurrent states; answers end where the context does"
        reporter.warn("no context shift", why=why)
    return weights, model, words_of_file(weights, reporter)


def words_of_file(weights: Weights, reporter: Reporter) -> Vocabulary:
    vocabulary = vocabulary_of(weights.metadata)
    for note in vocabulary.notes:
        reporter.warn("tokenizer", note=note)
    return vocabulary


def cache_kind(settings: Settings, reporter: Reporter) -> CacheKind:
    """One type for keys and values: the better one of those asked for that there are."""
    asked = (settings.cache_type_k, settings.cache_type_v)
    kinds = {CACHE_KINDS[name] for name in asked}
    kind: CacheKind = "F16" if "F16" in kinds else "Q8_0"
    if any(name.upper() != kind for name in asked):
        reporter.warn("cache", keys=asked[0], values=asked[1], used=kind.lower())
    return kind


def facts_of(path: Path, weights: Weights, model: Model) -> Facts:
    embedding = weights.tensors["token_embd.weight"]
    kinds = [weight.kind for weight in weights.tensors.values() if len(weight.shape) > 1]
    return Facts(
        name=path.name,
        path=str(path),
        size_bytes=weights.size_bytes,
        parameter_count=sum(int(np.prod(w.shape)) for w in weights.tensors.values()),
        ftype=max(sorted(set(kinds)), key=kinds.count),
        architecture=model.architecture,
        width=embedding.shape[1],
        context_trained=model.context_length,
    )
