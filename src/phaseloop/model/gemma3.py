"""Gemma 3: norms before and after each part, most layers looking back only over a window.

Of every `pattern` layers the last sees all positions and turns by the model's own rope; the others
see a window and turn by a base of their own, unscaled.  Norm weights are stored as 1 + w.
"""

import math

from msgspec import Struct
from msgspec.structs import replace

from phaseloop.ops.interface import Attention, Ops, Rope, Tensor

from .decoder import (
    AttentionLayer,
    GatedLayer,
    attend,
    attention_layer,
    expect_attention,
    expect_feed,
    feed,
    feed_layer,
)
from .embedding import pooling_of
from .shape import (
    CONTEXT_LENGTH_MAX,
    EMBEDDING,
    LAYER_COUNT_MAX,
    Encoding,
    Model,
    Shape,
    dimensions_of,
    expect_ends,
    head_of,
    read_rope,
    read_shape,
    score_scale,
)
from .weights import OTHER, Expected, Weights

LAYERS_OF_27B = 62  # whose queries are scaled by the width per head, not by the head's own
PATTERN, LOCAL_BASE = 6, 10_000.0


class Layer(Struct, frozen=True):
    attention_norm: str
    attention: AttentionLayer
    attended_norm: str
    feed_norm: str
    feed: GatedLayer
    fed_norm: str


class Gemma3(Struct, frozen=True):
    layers: tuple[Layer, ...]
    head: str | None  # None: the rows behind the last norm are wanted
    epsilon: float
    embedding_scale: float
    logit_cap: float | None

    def __call__(self, ops: Ops[Tensor], /) -> Tensor:
        x = ops.scale(ops.embed(EMBEDDING), self.embedding_scale)
        for index, layer in enumerate(self.layers):
            ops.tap(index, x)
            normed = ops.rms_norm(x, layer.attention_norm, self.epsilon)
            attended = attend(ops, normed, layer.attention)
            if layer is self.layers[-1]:  # later positions need only this layer's keys and values
                x, attended = ops.outputs(x), ops.outputs(attended)
            x = ops.add(x, ops.rms_norm(attended, layer.attended_norm, self.epsilon))
            fed = feed(ops, ops.rms_norm(x, layer.feed_norm, self.epsilon), layer.feed)
            x = ops.add(x, ops.rms_norm(fed, layer.fed_norm, self.epsilon))
        x = ops.rms_norm(x, "output_norm.weight", self.epsilon)
        x = ops.final(x)
        if self.head is None:
            return x
        logits = ops.linear(self.head, x)
        return logits if self.logit_cap is None else ops.soft_cap(logits, self.logit_cap)


def gemma3(weights: Weights) -> Model:
    shape = read_shape(weights, "gemma3")
    if shape.expert_count:
        what = "key gemma3.expert_count: mixtures of this family are not supported"
        raise weights.error(what, OTHER)
    rope = read_rope(weights, "gemma3", shape, "halves")
    weights.check(expected_tensors(shape, rope))
    local = replace(
        rope,
        base=weights.number("gemma3.rope.freq_base_swa", 1.001, 1e15, LOCAL_BASE),
        frequency_scale=1.0,
        extrapolation=0.0,
        factors=None,
    )
    window = weights.count("gemma3.attention.sliding_window", 1, CONTEXT_LENGTH_MAX)
    pattern = weights.count("gemma3.attention.sliding_window_pattern", 1, LAYER_COUNT_MAX, PATTERN)
    is_27b = shape.layer_count == LAYERS_OF_27B
    spec = Attention(
        scale=score_scale(shape.width // shape.head_count if is_27b else shape.key_length),
        cap=cap(weights, "gemma3.attn_logit_softcapping"),
    )
    layers: list[Layer] = []
    for index in range(shape.layer_count):
        if (index + 1) % pattern:
            layers.append(layer_of(weights, shape, index, local, replace(spec, window=window)))
        else:
            layers.append(layer_of(weights, shape, index, rope, spec))
    network = Gemma3(
        layers=tuple(layers),
        head=head_of(weights),
        epsilon=shape.epsilon,
        embedding_scale=math.sqrt(shape.width),
        logit_cap=cap(weights, "gemma3.final_logit_softcapping"),
    )
    return Model(
        architecture="gemma3",
        network=network,
        dimensions=dimensions_of(shape, tuple(layer.attention.rope for layer in layers)),
        context_length=shape.context_length,
        encoding=Encoding(replace(network, head=None), shape.width, pooling_of(weights, "gemma3")),
    )


def cap(weights: Weights, key: str) -> float | None:
    return weights.number(key, 0.0, 1e6, 0.0) or None


def layer_of(weights: Weights, shape: Shape, index: int, rope: Rope, spec: Attention) -> Layer:
    block = f"blk.{index}."
    gated = feed_layer(shape, index, "gelu")
    assert isinstance(gated, GatedLayer), "there are no experts"
    return Layer(
        attention_norm=f"{block}attn_norm.weight",
        attention=attention_layer(weights.tensors, shape, index, rope, spec),
        attended_norm=f"{block}post_attention_norm.weight",
        feed_norm=f"{block}ffn_norm.weight",
        feed=gated,
        fed_norm=f"{block}post_ffw_norm.weight",
    )


def expected_tensors(shape: Shape, rope: Rope) -> dict[str, Expected]:
    expected = expect_ends(shape, rope)
    for index in range(shape.layer_count):
        expected |= expect_attention(shape, index, head_norms=True) | expect_feed(shape, index)
        for part in ("attention", "ffw"):
            name = f"blk.{index}.post_{part}_norm.weight"
            expected[name] = Expected((shape.width,), is_vector=True)
    return expected
