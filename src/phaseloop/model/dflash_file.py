"""What a file of a DFlash drafter says, checked against the model that it drafts for."""

import numpy as np
from msgspec import Struct

from phaseloop.ops.interface import Rope

from .decoder import expect_attention, expect_feed
from .shape import (
    CONTEXT_LENGTH_MAX,
    EMBEDDING,
    HEAD,
    LAYER_COUNT_MAX,
    Shape,
    expect_ends,
    read_rope,
    read_shape,
)
from .weights import CONVERT, OTHER, Expected, Weights

FUSE, ENCODER_NORM, TOKEN_IDS = "fc.weight", "enc.output_norm.weight", "d2t"
BLOCK_LENGTH, BLOCK_LENGTH_MAX = 16, 256
SECTIONS = 4


class DflashFile(Struct, frozen=True):
    """`weights` are its own, and the target's embedding and head where it has none.

    `sections` says how the rotary pairs are shared among a position's axes, as far as the target
    has several: text has one value for all of them, so that nothing depends on it here.
    """

    weights: Weights
    shape: Shape
    rope: Rope
    sections: tuple[int, ...] | None
    target_layers: tuple[int, ...]
    target_width: int
    block_length: int
    mask: int
    token_ids: tuple[int, ...] | None
    windows: tuple[int | None, ...]  # per layer
    causal: bool
    embedding_scale: float
    score_scale: float  # 0: the usual
    value_scale: float

    @property
    def given_width(self) -> int:
        return len(self.target_layers) * self.target_width


def read_dflash(weights: Weights, target: Weights) -> DflashFile:
    borrowed = with_ends_of(weights, target)
    shape = read_shape(borrowed, "dflash")
    if shape.expert_count:
        raise weights.error("key dflash.expert_count: mixtures are not supported here", OTHER)
    if shape.key_length != shape.value_length:
        raise weights.error(
            f"key dflash.attention.value_length is {shape.value_length}, but key_length is "
            f"{shape.key_length}; they must be equal"
        )
    check_vocabulary(weights, shape, target)
    if weights.get("dflash.hidden_activation", str, "silu") != "silu":
        raise weights.error("key dflash.hidden_activation: only silu is supported", OTHER)
    rope = read_rope(borrowed, "dflash", shape, "halves")
    mask = weights.count("tokenizer.ggml.mask_token_id", 0, shape.vocabulary - 1)
    return DflashFile(
        weights=borrowed,
        shape=shape,
        rope=rope,
        sections=read_sections(weights, rope, target),
        target_layers=read_target_layers(weights, target),
        target_width=target.tensors[EMBEDDING].shape[1],
        block_length=weights.count("dflash.block_size", 2, BLOCK_LENGTH_MAX, BLOCK_LENGTH),
        mask=mask,
        token_ids=read_token_ids(weights, shape.vocabulary),
        windows=read_windows(weights, shape.layer_count),
        causal=weights.get("dflash.attention.causal", bool, False),
        embedding_scale=weights.number("dflash.embedding_scale", 0.0, 1e6, 1.0) or 1.0,
        score_scale=weights.number("dflash.attention.scale", 0.0, 1e6, 0.0),
        value_scale=weights.number("dflash.attention.value_scale", 0.0, 1e6, 1.0) or 1.0,
    )


def with_ends_of(weights: Weights, target: Weights) -> Weights:
    """A drafter with an embedding of its own uses that as its head, if it has no other."""
    tensors = {name: one for name, one in weights.tensors.items() if name != TOKEN_IDS}
    if EMBEDDING not in tensors:
        tensors[EMBEDDING] = target.tensors[EMBEDDING]
        if HEAD not in tensors and HEAD in target.tensors:
            tensors[HEAD] = target.tensors[HEAD]
    return Weights(weights.path, weights.metadata, tensors)


def check_vocabulary(weights: Weights, shape: Shape, target: Weights) -> None:
    rows, width = target.tensors[EMBEDDING].shape
    if shape.vocabulary != rows:
        raise weights.error(
            f"tensor {EMBEDDING} has {shape.vocabulary} rows, that of {target.path} has {rows}: it "
            "drafts for a model of other tokens",
            OTHER,
        )
    if EMBEDDING not in weights.tensors and shape.width != width:
        raise weights.error(
            f"key dflash.embedding_length is {shape.width}, but the embedding of {target.path}, "
            f"which it needs as it has none, is {width} wide",
            OTHER,
        )


def read_target_layers(weights: Weights, target: Weights) -> tuple[int, ...]:
    """The layers whose inputs are read; counted from 0, so that 1 reads what layer 0 left."""
    key = "dflash.target_layers"
    stated = weights.metadata.get(key)
    if stated is None:
        raise weights.error(f"key {key} is missing")
    layers = np.asarray(stated)
    if layers.ndim != 1 or not layers.size or layers.dtype.kind not in "iu":
        raise weights.error(f"key {key} is not a list of integers")
    architecture = target.get("general.architecture", str)
    count = target.count(f"{architecture}.block_count", 1, LAYER_COUNT_MAX)
    count -= target.count(f"{architecture}.nextn_predict_layers", 0, count, 0)
    if layers.min() < 0 or layers.max() >= count or len(set(layers.tolist())) < layers.size:
        raise weights.error(
            f"key {key} is {layers.tolist()}; {target.path} has layers 0 to {count - 1}, each of "
            "which can be read once",
            OTHER,
        )
    return tuple(layers.tolist())


def read_sections(weights: Weights, rope: Rope, target: Weights) -> tuple[int, ...] | None:
    """As stated; where nothing is, and the target has sections, all pairs follow the first axis."""
    key, pairs = "dflash.rope.dimension_sections", rope.dimensions // 2
    stated = weights.metadata.get(key)
    if stated is None:
        architecture = target.get("general.architecture", str)
        has_sections = f"{architecture}.rope.dimension_sections" in target.metadata
        return (pairs, 0, 0, 0) if has_sections else None
    sections = np.asarray(stated)
    if sections.shape != (SECTIONS,) or sections.dtype.kind not in "iu":
        raise weights.error(f"key {key} is not a list of {SECTIONS} integers")
    if sections.min() < 0 or sections.sum() > pairs:
        raise weights.error(
            f"key {key} is {sections.tolist()}, which does not share out {pairs} pairs"
        )
    return tuple(sections.tolist())


def read_windows(weights: Weights, layer_count: int) -> tuple[int | None, ...]:
    key = "dflash.attention.sliding_window"
    window = weights.count(key, 0, CONTEXT_LENGTH_MAX, 0)
    if not window:
        return (None,) * layer_count
    pattern = np.asarray(weights.metadata.get(f"{key}_pattern"))
    if pattern.shape != (layer_count,) or pattern.dtype != np.bool_:
        raise weights.error(f"key {key}_pattern is not a list of {layer_count} times true or false")
    return tuple(window if local else None for local in pattern)


def read_token_ids(weights: Weights, vocabulary: int) -> tuple[int, ...] | None:
    """Which of the target's tokens the rows of its head are, where it knows fewer."""
    table = weights.tensors.get(TOKEN_IDS)
    if table is None:
        return None
    head = weights.tensors.get(HEAD)
    if head is None:
        raise weights.error(f"tensor {TOKEN_IDS} needs a tensor {HEAD} of its own", CONVERT)
    if table.kind != "I64" or table.shape != (head.shape[0],):
        raise weights.error(
            f"tensor {TOKEN_IDS} is {table.kind} {list(table.shape)}, {HEAD} demands I64 "
            f"[{head.shape[0]}]"
        )
    ids = table.data.view(np.int64)
    if ids.min() < 0 or ids.max() >= vocabulary or len(np.unique(ids)) < ids.size:
        raise weights.error(f"tensor {TOKEN_IDS} names a token twice, or one that there is not")
    return tuple(ids.tolist())


def expected_tensors(file: DflashFile) -> dict[str, Expected]:
    shape = file.shape
    expected = expect_ends(shape, file.rope)
    if file.token_ids is not None:
        expected[HEAD] = Expected((len(file.token_ids), shape.width))
    expected[FUSE] = Expected((shape.width, file.given_width))
    expected[ENCODER_NORM] = Expected((shape.width,), is_vector=True)
    for index in range(shape.layer_count):
        expected |= expect_attention(shape, index, head_norms=True)
        expected |= expect_feed(shape, index)
    return expected
