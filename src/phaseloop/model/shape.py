"""Hyperparameters that the supported architectures share, read from metadata and bounded."""

import math
from typing import Literal, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from phaseloop.ops.interface import Dimensions, Network, Rope

from .weights import DOWNLOAD, OTHER, Expected, Weights

Pooling: TypeAlias = Literal["none", "mean", "cls", "last", "rank"]
LAYER_COUNT_MAX = 1024
WIDTH_MAX = 1 << 20
CONTEXT_LENGTH_MAX = 1 << 26
ROPE_FACTORS = "rope_freqs.weight"
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
OUTPUT_NORM = "output_norm.weight"


class Shape(Struct, frozen=True):
    """Counts and widths; `hidden` is the feed-forward width, of one expert where there are any."""

    layer_count: int
    width: int
    hidden: int
    head_count: int
    kv_head_count: int
    key_length: int
    value_length: int
    vocabulary: int
    context_length: int  # tokens it was trained for
    epsilon: float
    expert_count: int = 0
    expert_used: int = 0


class Encoding(Struct, frozen=True):
    """What a model gives instead of logits (model/embedding.py)."""

    rows: Network  # [O, width]: each token's row behind the last norm
    width: int
    pooling: Pooling | None  # what the file says is to be made of them
    scores: Network | None = None  # [O, label_count]: what a classifier makes of each row
    label_count: int = 0
    shares: bool = False  # scores are softmax'd over the labels


class Model(Struct, frozen=True):
    """A network with all that an engine and a backend need to know of it."""

    architecture: str
    network: Network
    dimensions: Dimensions
    context_length: int
    encoding: Encoding | None = None  # None: it only generates
    generates: bool = True  # an encoder does not


def read_shape(weights: Weights, architecture: str, norm: str = "layer_norm_rms_epsilon") -> Shape:
    def count(key: str, high: int, default: int | None = None, low: int = 1) -> int:
        return weights.count(f"{architecture}.{key}", low, high, default)

    width = count("embedding_length", WIDTH_MAX)
    head_count = count("attention.head_count", WIDTH_MAX)
    key_length = count("attention.key_length", WIDTH_MAX, max(1, width // head_count))
    expert_count = count("expert_count", 65_536, 0, low=0)
    hidden_key = "expert_feed_forward_length" if expert_count else "feed_forward_length"
    fallback = count("feed_forward_length", WIDTH_MAX, 0, low=0) or None
    shape = Shape(
        layer_count=count("block_count", LAYER_COUNT_MAX),
        width=width,
        hidden=count(hidden_key, WIDTH_MAX, fallback),
        head_count=head_count,
        kv_head_count=count("attention.head_count_kv", head_count, head_count),
        key_length=key_length,
        value_length=count("attention.value_length", WIDTH_MAX, key_length),
        vocabulary=read_vocabulary(weights),
        context_length=count("context_length", CONTEXT_LENGTH_MAX),
        epsilon=weights.number(f"{architecture}.attention.{norm}", 0.0, 1.0),
        expert_count=expert_count,
        expert_used=count("expert_used_count", expert_count) if expert_count else 0,
    )
    if shape.head_count % shape.kv_head_count:
        raise weights.error(
            f"key {architecture}.attention.head_count_kv is {shape.kv_head_count}, which does not "
            f"divide the {shape.head_count} heads"
        )
    return shape


def read_vocabulary(weights: Weights) -> int:
    """Rows of the embedding; the tokenizer may know fewer tokens, never more."""
    embedding = weights.tensors.get(EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise weights.error(f"tensor {EMBEDDING} is missing or no matrix", DOWNLOAD)
    tokens = weights.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > embedding.shape[0]:
        raise weights.error(
            f"key tokenizer.ggml.tokens has {len(tokens)} tokens, {EMBEDDING} only "
            f"{embedding.shape[0]} rows"
        )
    return embedding.shape[0]


def read_rope(
    weights: Weights, architecture: str, shape: Shape, pairs: Literal["adjacent", "halves"]
) -> Rope:
    """Base, width and scaling: none, linear, yarn, or llama3 (whose factors are a tensor)."""
    key = f"{architecture}.rope."
    dimensions = weights.count(f"{key}dimension_count", 2, shape.key_length, shape.key_length)
    if dimensions % 2:
        raise weights.error(f"key {key}dimension_count is {dimensions}, an odd number")
    rope = Rope(
        dimensions=dimensions,
        base=weights.number(f"{key}freq_base", 1.001, 1e15, 10_000.0),
        pairs=pairs,
        factors=ROPE_FACTORS if ROPE_FACTORS in weights.tensors else None,
    )
    factor = weights.number(f"{key}scale_linear", 1e-6, 1e6, 1.0)  # files of 2023 have only this
    factor = weights.number(f"{key}scaling.factor", 0.0, 1e6, factor) or 1.0
    match weights.get(f"{key}scaling.type", str, "none" if factor == 1.0 else "linear"):
        case "none":
            return rope
        case "linear":
            return replace(rope, frequency_scale=1.0 / factor)
        case "yarn":
            return yarn(weights, f"{key}scaling.", shape, rope, factor)
        case other:
            raise weights.error(
                f"key {key}scaling.type is {other!r}, which is not supported", OTHER
            )


def yarn(weights: Weights, key: str, shape: Shape, rope: Rope, factor: float) -> Rope:
    return replace(
        rope,
        frequency_scale=1.0 / factor,
        extrapolation=weights.number(f"{key}yarn_ext_factor", 0.0, 1.0, 1.0),
        attention_factor=weights.number(f"{key}attn_factor", 1e-3, 1e3, 1.0),
        beta_fast=weights.number(f"{key}yarn_beta_fast", 1e-3, 1e6, 32.0),
        beta_slow=weights.number(f"{key}yarn_beta_slow", 1e-3, 1e6, 1.0),
        context_original=weights.count(
            f"{key}original_context_length", 1, CONTEXT_LENGTH_MAX, shape.context_length
        ),
    )


def dimensions_of(shape: Shape, ropes: tuple[Rope, ...]) -> Dimensions:
    return Dimensions(
        ropes=ropes,
        kv_head_count=shape.kv_head_count,
        key_length=shape.key_length,
        value_length=shape.value_length,
        vocabulary=shape.vocabulary,
    )


def expect_ends(shape: Shape, rope: Rope) -> dict[str, Expected]:
    """The tensors outside the layers.  Without a head of its own, a model uses its embedding."""
    return {
        EMBEDDING: Expected((shape.vocabulary, shape.width)),
        "output_norm.weight": Expected((shape.width,), is_vector=True),
        HEAD: Expected((shape.vocabulary, shape.width), is_optional=True),
        ROPE_FACTORS: Expected((rope.dimensions // 2,), is_vector=True, is_optional=True),
    }


def head_of(weights: Weights) -> str:
    return HEAD if HEAD in weights.tensors else EMBEDDING


def score_scale(width: int) -> float:
    return 1.0 / math.sqrt(width)
