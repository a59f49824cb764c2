"""The decoder that Llama set the pattern for: pre-norm attention and gated feed-forward.

Families differ in which weights a layer has, how positions turn, and whether the feed-forward part
is a mixture of experts; so a layer is data, and this file walks it.
"""

from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from phaseloop.ops.interface import Activation, Attention, Experts, Ops, Rope, Tensor, Weight

from .embedding import Head, apply_head, classifier, expect_classifier, pooling_of
from .shape import (
    EMBEDDING,
    Encoding,
    Model,
    Shape,
    dimensions_of,
    expect_ends,
    head_of,
    score_scale,
)
from .weights import Expected, Weights


class AttentionLayer(Struct, frozen=True):
    """Names of weights, None where a family has none, and how the layer attends."""

    index: int
    head_count: int
    kv_head_count: int
    epsilon: float
    rope: Rope
    spec: Attention
    query: str
    key: str
    value: str
    output: str
    query_bias: str | None
    key_bias: str | None
    value_bias: str | None
    output_bias: str | None
    query_norm: str | None
    key_norm: str | None


class GatedLayer(Struct, frozen=True):
    gate: str
    up: str
    down: str
    activation: Activation


class Layer(Struct, frozen=True):
    attention_norm: str
    attention: AttentionLayer
    feed_norm: str
    feed: GatedLayer | Experts


class Decoder(Struct, frozen=True):
    layers: tuple[Layer, ...]
    head: str | Head | None  # None: the rows behind the last norm are wanted
    epsilon: float

    def __call__(self, ops: Ops[Tensor], /) -> Tensor:
        x = ops.embed(EMBEDDING)
        for index, layer in enumerate(self.layers):
            ops.tap(index, x)
            attended = attend(
                ops, ops.rms_norm(x, layer.attention_norm, self.epsilon), layer.attention
            )
            if layer is self.layers[-1]:  # later positions need only this layer's keys and values
                x, attended = ops.outputs(x), ops.outputs(attended)
            x = ops.add(x, attended)
            x = ops.add(x, feed(ops, ops.rms_norm(x, layer.feed_norm, self.epsilon), layer.feed))
        x = ops.final(ops.rms_norm(x, "output_norm.weight", self.epsilon))
        if isinstance(self.head, Head):
            return apply_head(ops, x, self.head)
        return x if self.head is None else ops.linear(self.head, x)


def attend(ops: Ops[Tensor], x: Tensor, layer: AttentionLayer) -> Tensor:
    """[T, D] -> [T, D]: queries, keys, values, norms of heads, positions, attention, output."""
    q = ops.heads(ops.linear(layer.query, x, layer.query_bias), layer.head_count)
    k = ops.heads(ops.linear(layer.key, x, layer.key_bias), layer.kv_head_count)
    v = ops.heads(ops.linear(layer.value, x, layer.value_bias), layer.kv_head_count)
    if layer.query_norm is not None:
        q = ops.rms_norm(q, layer.query_norm, layer.epsilon)
    if layer.key_norm is not None:
        k = ops.rms_norm(k, layer.key_norm, layer.epsilon)
    q, k = ops.rope(q, layer.rope), ops.rope(k, layer.rope)
    attended = ops.attend(layer.index, q, k, v, layer.spec)
    return ops.linear(layer.output, attended, layer.output_bias)


def feed(ops: Ops[Tensor], x: Tensor, layer: GatedLayer | Experts) -> Tensor:
    if isinstance(layer, Experts):
        return ops.experts(x, layer)
    hidden = ops.gated(ops.linear(layer.gate, x), ops.linear(layer.up, x), layer.activation)
    return ops.linear(layer.down, hidden)


# --- from metadata to layers ----------------------------------------------------------------------


def attention_layer(
    tensors: Mapping[str, Weight], shape: Shape, index: int, rope: Rope, spec: Attention
) -> AttentionLayer:
    def optional(name: str) -> str | None:
        full = f"blk.{index}.{name}"
        return full if full in tensors else None

    return AttentionLayer(
        index=index,
        head_count=shape.head_count,
        kv_head_count=shape.kv_head_count,
        epsilon=shape.epsilon,
        rope=rope,
        spec=spec,
        query=f"blk.{index}.attn_q.weight",
        key=f"blk.{index}.attn_k.weight",
        value=f"blk.{index}.attn_v.weight",
        output=f"blk.{index}.attn_output.weight",
        query_bias=optional("attn_q.bias"),
        key_bias=optional("attn_k.bias"),
        value_bias=optional("attn_v.bias"),
        output_bias=optional("attn_output.bias"),
        query_norm=optional("attn_q_norm.weight"),
        key_norm=optional("attn_k_norm.weight"),
    )


def feed_layer(shape: Shape, index: int, activation: Activation = "silu") -> GatedLayer | Experts:
    block = f"blk.{index}."
    if not shape.expert_count:
        gate, up, down = (f"{block}ffn_{part}.weight" for part in ("gate", "up", "down"))
        return GatedLayer(gate, up, down, activation)
    gate, up, down = (f"{block}ffn_{part}_exps.weight" for part in ("gate", "up", "down"))
    router = f"{block}ffn_gate_inp.weight"
    return Experts(router, gate, up, down, shape.expert_used, True, activation)


def expect_attention(
    shape: Shape, index: int, *, biases: bool = False, head_norms: bool = False
) -> dict[str, Expected]:
    block = f"blk.{index}."
    query, key = shape.head_count * shape.key_length, shape.kv_head_count * shape.key_length
    value, output = (
        count * shape.value_length for count in (shape.kv_head_count, shape.head_count)
    )
    expected = {
        f"{block}attn_norm.weight": Expected((shape.width,), is_vector=True),
        f"{block}attn_q.weight": Expected((query, shape.width)),
        f"{block}attn_k.weight": Expected((key, shape.width)),
        f"{block}attn_v.weight": Expected((value, shape.width)),
        f"{block}attn_output.weight": Expected((shape.width, output)),
    }
    if biases:
        sizes = {"q": query, "k": key, "v": value, "output": shape.width}
        for part, size in sizes.items():
            expected[f"{block}attn_{part}.bias"] = Expected((size,), True, True)
    if head_norms:
        for part in "qk":
            name = f"{block}attn_{part}_norm.weight"
            expected[name] = Expected((shape.key_length,), is_vector=True)
    return expected


def expect_feed(shape: Shape, index: int) -> dict[str, Expected]:
    block, experts = f"blk.{index}.", shape.expert_count
    expected = {f"{block}ffn_norm.weight": Expected((shape.width,), is_vector=True)}
    inner, outer = (shape.hidden, shape.width), (shape.width, shape.hidden)
    shapes = {"gate": inner, "up": inner, "down": outer}
    if not experts:
        return expected | {f"{block}ffn_{part}.weight": Expected(s) for part, s in shapes.items()}
    expected[f"{block}ffn_gate_inp.weight"] = Expected((experts, shape.width))
    return expected | {
        f"{block}ffn_{part}_exps.weight": Expected((experts, *s)) for part, s in shapes.items()
    }


def decoder_model(
    weights: Weights,
    architecture: str,
    shape: Shape,
    rope: Rope,
    *,
    biases: bool = False,
    head_norms: bool = False,
) -> Model:
    """A decoder all of whose layers are alike.  Raises ModelError where the tensors differ."""
    expected = expect_ends(shape, rope)
    for index in range(shape.layer_count):
        expected |= expect_attention(shape, index, biases=biases, head_norms=head_norms)
        expected |= expect_feed(shape, index)
    weights.check(expected | expect_classifier(weights, architecture, shape.width))
    spec = Attention(scale=score_scale(shape.key_length))
    layers = tuple(
        Layer(
            attention_norm=f"blk.{index}.attn_norm.weight",
            attention=attention_layer(weights.tensors, shape, index, rope, spec),
            feed_norm=f"blk.{index}.ffn_norm.weight",
            feed=feed_layer(shape, index),
        )
        for index in range(shape.layer_count)
    )
    network = Decoder(layers, head_of(weights), shape.epsilon)
    head = classifier(weights, architecture)
    return Model(
        architecture=architecture,
        network=network,
        dimensions=dimensions_of(shape, (rope,) * shape.layer_count),
        context_length=shape.context_length,
        encoding=Encoding(
            rows=replace(network, head=None),
            width=shape.width,
            pooling=pooling_of(weights, architecture),
            scores=head and replace(network, head=head),
            label_count=head.label_count if head else 0,
            shares=architecture == "qwen3",  # as those who made rankers of it have it
        ),
    )
