"""What a model gives instead of logits: a row per token, or what a classifier makes of it."""

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from phaseloop.ops.interface import Ops, Tensor

from .shape import Model, Pooling
from .weights import OTHER, Expected, Weights

POOLINGS: tuple[Pooling, ...] = ("none", "mean", "cls", "last", "rank")  # as GGUF numbers them
DENSE, OUTPUT = "cls", "cls.output"
LABELS_MAX = 65_536


class Head(Struct, frozen=True):
    """A classifier: a dense layer with tanh, a projection to labels, or both, by their names."""

    dense: str | None
    output: str | None
    dense_bias: str | None
    output_bias: str | None
    label_count: int


def apply_head(ops: Ops[Tensor], x: Tensor, head: Head) -> Tensor:
    """[O, D] -> [O, labels]."""
    if head.dense is not None:
        x = ops.activated(ops.linear(head.dense, x, head.dense_bias), "tanh")
    return x if head.output is None else ops.linear(head.output, x, head.output_bias)


def pooling_of(weights: Weights, architecture: str) -> Pooling | None:
    """None where the file does not say."""
    key = f"{architecture}.pooling_type"
    if key not in weights.metadata:
        return None
    return POOLINGS[weights.count(key, 0, len(POOLINGS) - 1)]


def classifier(weights: Weights, architecture: str) -> Head | None:
    names = weights.tensors
    if f"{DENSE}.weight" not in names and f"{OUTPUT}.weight" not in names:
        return None

    def known(name: str) -> str | None:
        return name if name in names else None

    dense, output = known(f"{DENSE}.weight"), known(f"{OUTPUT}.weight")
    last = names[output or f"{DENSE}.weight"]
    return Head(dense, output, known(f"{DENSE}.bias"), known(f"{OUTPUT}.bias"), last.shape[0])


def expect_classifier(weights: Weights, architecture: str, width: int) -> dict[str, Expected]:
    """The tensors of a classifier, if the file has one; labels as many as it names."""
    labels = label_count(weights, architecture)
    return {
        f"{DENSE}.weight": Expected((width, width), is_optional=True),
        f"{DENSE}.bias": Expected((width,), is_vector=True, is_optional=True),
        f"{OUTPUT}.weight": Expected((labels, width), is_optional=True),
        f"{OUTPUT}.bias": Expected((labels,), is_vector=True, is_optional=True),
    }


def label_count(weights: Weights, architecture: str) -> int:
    key = f"{architecture}.classifier.output_labels"
    labels = weights.metadata.get(key)
    if labels is None:
        return 1
    if not isinstance(labels, list | np.ndarray) or not 1 <= len(labels) <= LABELS_MAX:
        raise weights.error(f"key {key} is no list of 1 to {LABELS_MAX} labels")
    return len(labels)


def encoder_of(model: Model, weights: Weights, wanted: Pooling | None) -> tuple[Model, Pooling]:
    """The model as one that gives rows or scores, and what is to be made of these.

    `wanted` None: as the file says, else `none`.  Raises ModelError where it cannot be had.
    """
    encoding = model.encoding
    if encoding is None:
        what = f"architecture {model.architecture!r} gives no embeddings"
        raise weights.error(what, OTHER)
    pooling = wanted or encoding.pooling or "none"
    network, width = encoding.rows, encoding.width
    if pooling == "rank":
        if encoding.scores is None:
            what = "there is no classifier (tensors cls and cls.output), so nothing can be ranked"
            raise weights.error(what, "use a model that was made for reranking")
        network, width = encoding.scores, encoding.label_count
    dimensions = replace(model.dimensions, output_width=width)
    return replace(model, network=network, dimensions=dimensions, generates=False), pooling
