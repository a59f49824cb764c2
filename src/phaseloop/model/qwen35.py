"""Qwen 3.5 and its kin, dense and mixtures: most layers recur, every fourth attends.

A layer that recurs is a gated delta net, one that attends gates the output of each head; what
follows is a feed-forward part or a mixture with a shared expert.  What a loader must know of files:
norm weights are stored as 1 + w, except the delta net's; `ssm_a` is -exp(A_log); value heads are
tiled over key heads, so that head h reads key head h modulo their number; a query's head lies
beside its gate.  Positions turn by interleaved M-RoPE, whose axes are one and the same for text.
"""

from msgspec import Struct
from msgspec.structs import replace

from phaseloop.ops.interface import (
    Attention,
    DeltaNet,
    Experts,
    Ops,
    Recurrence,
    Rope,
    Tensor,
)

from .decoder import AttentionLayer, GatedLayer, attention_layer, feed, feed_layer
from .qwen35_file import (
    Hybrid,
    block_name,
    expected_tensors,
    has_only_draft,
    read_hybrid,
)
from .shape import EMBEDDING, OUTPUT_NORM, Model, dimensions_of, head_of, score_scale
from .weights import Weights


class GatedAttention(Struct, frozen=True):
    """`layer.query` maps to queries and gates; `fused`, where there is one, to all there are."""

    layer: AttentionLayer
    width: int  # of a head
    fused: str | None


class DeltaLayer(Struct, frozen=True):
    index: int  # among the layers that recur
    value_heads: int
    epsilon: float
    mixed: str
    gate: str
    step: str
    step_bias: str
    rate: str
    norm: str
    output: str
    spec: DeltaNet


class SharedExpert(Struct, frozen=True):
    """Serves every row, by a share that `router` [D] decides."""

    router: str
    layer: GatedLayer


class Layer(Struct, frozen=True):
    norm: str
    mixer: GatedAttention | DeltaLayer
    feed_norm: str
    feed: GatedLayer | Experts
    shared: SharedExpert | None


class Qwen35(Struct, frozen=True):
    layers: tuple[Layer, ...]
    head: str
    epsilon: float

    def __call__(self, ops: Ops[Tensor], /) -> Tensor:
        x = ops.embed(EMBEDDING)
        for index, layer in enumerate(self.layers):
            ops.tap(index, x)
            x = through(ops, x, layer, self.epsilon, is_last=layer is self.layers[-1])
        x = ops.rms_norm(x, OUTPUT_NORM, self.epsilon)
        return ops.linear(self.head, ops.final(x))


def through(ops: Ops[Tensor], x: Tensor, layer: Layer, epsilon: float, *, is_last: bool) -> Tensor:
    mixed = mix(ops, ops.rms_norm(x, layer.norm, epsilon), layer.mixer)
    if is_last:  # later positions need only this layer's keys and states
        x, mixed = ops.outputs(x), ops.outputs(mixed)
    x = ops.add(x, mixed)
    normed = ops.rms_norm(x, layer.feed_norm, epsilon)
    x = ops.add(x, feed(ops, normed, layer.feed))
    return x if layer.shared is None else ops.add(x, shared(ops, normed, layer.shared))


def mix(ops: Ops[Tensor], x: Tensor, layer: GatedAttention | DeltaLayer) -> Tensor:
    return attend(ops, x, layer) if isinstance(layer, GatedAttention) else recur(ops, x, layer)


def attend(ops: Ops[Tensor], x: Tensor, gated: GatedAttention) -> Tensor:
    layer = gated.layer
    query, key, value = project(ops, x, gated)
    q, gate = ops.split(ops.heads(query, layer.head_count), (gated.width, gated.width))
    k, v = (ops.heads(part, layer.kv_head_count) for part in (key, value))
    assert layer.query_norm is not None and layer.key_norm is not None, "checked at loading"
    q = ops.rope(ops.rms_norm(q, layer.query_norm, layer.epsilon), layer.rope)
    k = ops.rope(ops.rms_norm(k, layer.key_norm, layer.epsilon), layer.rope)
    attended = ops.attend(layer.index, q, k, v, layer.spec)
    return ops.linear(layer.output, ops.gated(ops.flat(gate), attended, "sigmoid"))


def project(ops: Ops[Tensor], x: Tensor, gated: GatedAttention) -> tuple[Tensor, ...]:
    """Queries with gates, keys, values."""
    layer = gated.layer
    if gated.fused is None:
        return tuple(ops.linear(name, x) for name in (layer.query, layer.key, layer.value))
    keys = layer.kv_head_count * gated.width
    sizes = (2 * layer.head_count * gated.width, keys, keys)
    return ops.split(ops.linear(gated.fused, x), sizes)


def recur(ops: Ops[Tensor], x: Tensor, layer: DeltaLayer) -> Tensor:
    gate = ops.heads(ops.linear(layer.gate, x), layer.value_heads)
    found = ops.delta_net(
        layer.index,
        ops.linear(layer.mixed, x),
        ops.linear(layer.step, x, layer.step_bias),
        ops.linear(layer.rate, x),
        layer.spec,
    )
    normed = ops.rms_norm(found, layer.norm, layer.epsilon)
    return ops.linear(layer.output, ops.flat(ops.gated(gate, normed, "silu")))


def shared(ops: Ops[Tensor], x: Tensor, expert: SharedExpert) -> Tensor:
    return ops.gated(ops.linear(expert.router, x), feed(ops, x, expert.layer), "sigmoid")


# --- from metadata to layers ----------------------------------------------------------------------


def qwen35(weights: Weights) -> Model:
    return hybrid_model(weights, "qwen35")


def qwen35moe(weights: Weights) -> Model:
    return hybrid_model(weights, "qwen35moe")


def hybrid_model(weights: Weights, architecture: str) -> Model:
    """Raises ModelError where metadata or tensors are not as the architecture has them."""
    if has_only_draft(weights, architecture):
        raise weights.error(
            "it has only the block that drafts for a model, not the model", "name it by -md"
        )
    hybrid = read_hybrid(weights, architecture)
    weights.check(expected_tensors(weights, hybrid))
    shape = hybrid.shape
    dimensions = dimensions_of(shape, (hybrid.rope,) * hybrid.is_recurrent.count(False))
    return Model(
        architecture=architecture,
        network=Qwen35(layers_of(weights, hybrid), head_of(weights), shape.epsilon),
        dimensions=replace(dimensions, recurrence=hybrid.recurrence),
        context_length=shape.context_length,
    )


def layers_of(weights: Weights, hybrid: Hybrid) -> tuple[Layer, ...]:
    layers: list[Layer] = []
    for index, is_recurrent in enumerate(hybrid.is_recurrent):
        place = hybrid.is_recurrent[:index].count(is_recurrent)  # among those of its kind
        if is_recurrent:
            mixer = delta_layer(index, place, hybrid.recurrence, hybrid.shape.epsilon)
        else:
            mixer = gated_attention(weights, hybrid, index, place, hybrid.rope)
        layers.append(layer_of(weights, hybrid, index, mixer))
    return tuple(layers)


def layer_of(
    weights: Weights, hybrid: Hybrid, index: int, mixer: GatedAttention | DeltaLayer
) -> Layer:
    return Layer(
        norm=block_name(index, "attn_norm"),
        mixer=mixer,
        feed_norm=block_name(index, "post_attention_norm"),
        feed=experts_or_dense(weights, hybrid, index),
        shared=shared_expert(index) if hybrid.shape.expert_count else None,
    )


def gated_attention(
    weights: Weights, hybrid: Hybrid, index: int, place: int, rope: Rope
) -> GatedAttention:
    shape, fused = hybrid.shape, block_name(index, "attn_qkv")
    spec = Attention(scale=score_scale(shape.key_length))
    layer = replace(attention_layer(weights.tensors, shape, index, rope, spec), index=place)
    return GatedAttention(layer, shape.key_length, fused if fused in weights.tensors else None)


def delta_layer(index: int, place: int, sizes: Recurrence, epsilon: float) -> DeltaLayer:
    return DeltaLayer(
        index=place,
        value_heads=sizes.value_heads,
        epsilon=epsilon,
        mixed=block_name(index, "attn_qkv"),
        gate=block_name(index, "attn_gate"),
        step=block_name(index, "ssm_alpha"),
        step_bias=f"blk.{index}.ssm_dt.bias",
        rate=block_name(index, "ssm_beta"),
        norm=block_name(index, "ssm_norm"),
        output=block_name(index, "ssm_out"),
        spec=DeltaNet(block_name(index, "ssm_conv1d"), f"blk.{index}.ssm_a", epsilon),
    )


def experts_or_dense(weights: Weights, hybrid: Hybrid, index: int) -> GatedLayer | Experts:
    layer = feed_layer(hybrid.shape, index)
    both = block_name(index, "ffn_gate_up_exps")
    if isinstance(layer, Experts) and both in weights.tensors:
        return replace(layer, gate=both, up=None)
    return layer


def shared_expert(index: int) -> SharedExpert:
    gate, up, down = (block_name(index, f"ffn_{part}_shexp") for part in ("gate", "up", "down"))
    router = block_name(index, "ffn_gate_inp_shexp")
    return SharedExpert(router, GatedLayer(gate, up, down, "silu"))
