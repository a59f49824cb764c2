"""BERT and its kin: encoders, whose rows look both ways and are what the model is for.

    bert         positions are learnt, feed-forward is a matrix, a gelu and a matrix
    nomic-bert   positions turn queries and keys, feed-forward is gated by silu, no biases

All text is of the first token type.  Norms come after what they are for.  Weights' names are those
of the file; queries, keys and values may be one matrix there.
"""

from msgspec import Struct
from msgspec.structs import replace

from phaseloop.ops.interface import Attention, Dimensions, Ops, Rope, Tensor

from .embedding import Head, apply_head, classifier, expect_classifier, pooling_of
from .shape import EMBEDDING, Encoding, Model, Shape, read_rope, read_shape, score_scale
from .weights import Expected, Weights

POSITIONS, TYPES, NORM = "position_embd.weight", "token_types.weight", "token_embd_norm"


class Layer(Struct, frozen=True):
    """Names of weights without `.weight` and `.bias`; None where a family has none."""

    index: int
    query: str
    key: str
    value: str
    fused: str | None  # queries, keys and values in one
    output: str
    attended_norm: str
    gate: str | None
    up: str
    down: str
    fed_norm: str


class Bert(Struct, frozen=True):
    layers: tuple[Layer, ...]
    head_count: int
    kv_head_count: int
    key_length: int
    epsilon: float
    biases: frozenset[str]  # of those that have one
    spec: Attention
    rope: Rope | None  # None: positions are learnt
    has_types: bool
    head: Head | None = None

    def __call__(self, ops: Ops[Tensor], /) -> Tensor:
        x = ops.embed(EMBEDDING)
        if self.has_types:
            x = ops.add(x, ops.first_row(TYPES))
        if self.rope is None:
            x = ops.add(x, ops.embed(POSITIONS, "position"))
        x = self._norm(ops, x, NORM)
        for layer in self.layers:
            attended = self._attend(ops, x, layer)
            if layer is self.layers[-1]:
                x, attended = ops.outputs(x), ops.outputs(attended)
            x = self._norm(ops, ops.add(attended, x), layer.attended_norm)
            x = self._norm(ops, ops.add(self._feed(ops, x, layer), x), layer.fed_norm)
        return x if self.head is None else apply_head(ops, x, self.head)

    def _attend(self, ops: Ops[Tensor], x: Tensor, layer: Layer) -> Tensor:
        if layer.fused is None:
            q, k, v = (self._linear(ops, x, one) for one in (layer.query, layer.key, layer.value))
        else:
            width, kv_width = (
                count * self.key_length for count in (self.head_count, self.kv_head_count)
            )
            q, k, v = ops.split(self._linear(ops, x, layer.fused), (width, kv_width, kv_width))
        q, k = ops.heads(q, self.head_count), ops.heads(k, self.kv_head_count)
        if self.rope is not None:
            q, k = ops.rope(q, self.rope), ops.rope(k, self.rope)
        attended = ops.attend(layer.index, q, k, ops.heads(v, self.kv_head_count), self.spec)
        return self._linear(ops, attended, layer.output)

    def _feed(self, ops: Ops[Tensor], x: Tensor, layer: Layer) -> Tensor:
        hidden = self._linear(ops, x, layer.up)
        if layer.gate is None:
            hidden = ops.activated(hidden, "gelu_erf")
        else:
            hidden = ops.gated(self._linear(ops, x, layer.gate), hidden, "silu")
        return self._linear(ops, hidden, layer.down)

    def _linear(self, ops: Ops[Tensor], x: Tensor, name: str) -> Tensor:
        return ops.linear(f"{name}.weight", x, f"{name}.bias" if name in self.biases else None)

    def _norm(self, ops: Ops[Tensor], x: Tensor, name: str) -> Tensor:
        return ops.layer_norm(x, f"{name}.weight", f"{name}.bias", self.epsilon)


def bert(weights: Weights) -> Model:
    return encoder(weights, "bert", None, is_gated=False)


def nomic_bert(weights: Weights) -> Model:
    shape = read_shape(weights, "nomic-bert", norm="layer_norm_epsilon")
    return encoder(
        weights, "nomic-bert", read_rope(weights, "nomic-bert", shape, "halves"), is_gated=True
    )


def encoder(weights: Weights, architecture: str, rope: Rope | None, *, is_gated: bool) -> Model:
    """Raises ModelError where metadata and tensors differ from the architecture's."""
    shape = read_shape(weights, architecture, norm="layer_norm_epsilon")
    types = weights.count("tokenizer.ggml.token_type_count", 1, 1 << 16, 2)
    layers = tuple(layer_of(weights, index, is_gated) for index in range(shape.layer_count))
    expected = expected_ends(shape, types, rope)
    for layer in layers:
        expected |= expected_layer(shape, layer)
    weights.check(expected | expect_classifier(weights, architecture, shape.width))
    network = Bert(
        layers=layers,
        head_count=shape.head_count,
        kv_head_count=shape.kv_head_count,
        key_length=shape.key_length,
        epsilon=shape.epsilon,
        biases=frozenset(
            name.removesuffix(".bias") for name in weights.tensors if name.endswith(".bias")
        ),
        spec=Attention(scale=score_scale(shape.key_length), causal=False),
        rope=rope,
        has_types=TYPES in weights.tensors,
    )
    head = classifier(weights, architecture)
    return Model(
        architecture=architecture,
        network=network,
        dimensions=dimensions_of(shape, rope),
        context_length=shape.context_length,
        encoding=Encoding(
            rows=network,
            width=shape.width,
            pooling=pooling_of(weights, architecture),
            scores=head and replace(network, head=head),
            label_count=head.label_count if head else 0,
        ),
        generates=False,
    )


def dimensions_of(shape: Shape, rope: Rope | None) -> Dimensions:
    """Keys are never turned back (`shift`), so without a rope any will do."""
    unturned = Rope(shape.key_length, 10_000.0, "halves")
    return Dimensions(
        ropes=(rope or unturned,) * shape.layer_count,
        kv_head_count=shape.kv_head_count,
        key_length=shape.key_length,
        value_length=shape.key_length,
        vocabulary=shape.vocabulary,
        output_width=shape.width,
        whole_lanes=True,
    )


def layer_of(weights: Weights, index: int, is_gated: bool) -> Layer:
    block = f"blk.{index}."
    fused = f"{block}attn_qkv"
    return Layer(
        index=index,
        query=f"{block}attn_q",
        key=f"{block}attn_k",
        value=f"{block}attn_v",
        fused=fused if f"{fused}.weight" in weights.tensors else None,
        output=f"{block}attn_output",
        attended_norm=f"{block}attn_output_norm",
        gate=f"{block}ffn_gate" if is_gated else None,
        up=f"{block}ffn_up",
        down=f"{block}ffn_down",
        fed_norm=f"{block}layer_output_norm",
    )


def expected_ends(shape: Shape, types: int, rope: Rope | None) -> dict[str, Expected]:
    expected = {EMBEDDING: Expected((shape.vocabulary, shape.width))} | norm(NORM, shape.width)
    expected[TYPES] = Expected((types, shape.width), is_optional=True)
    if rope is None:
        expected[POSITIONS] = Expected((shape.context_length, shape.width))
    return expected


def expected_layer(shape: Shape, layer: Layer) -> dict[str, Expected]:
    width, hidden = shape.width, shape.hidden
    inner = shape.head_count * shape.key_length
    kv = shape.kv_head_count * shape.key_length
    expected = norm(layer.attended_norm, width) | norm(layer.fed_norm, width)
    if layer.fused is not None:
        expected |= linear(layer.fused, inner + 2 * kv, width)
    else:
        expected |= linear(layer.query, inner, width)
        expected |= linear(layer.key, kv, width) | linear(layer.value, kv, width)
    expected |= linear(layer.output, width, inner)
    if layer.gate is not None:
        expected |= linear(layer.gate, hidden, width)
    return expected | linear(layer.up, hidden, width) | linear(layer.down, width, hidden)


def linear(name: str, rows: int, columns: int) -> dict[str, Expected]:
    bias = Expected((rows,), is_vector=True, is_optional=True)
    return {f"{name}.weight": Expected((rows, columns)), f"{name}.bias": bias}


def norm(name: str, width: int) -> dict[str, Expected]:
    return {f"{name}.{part}": Expected((width,), is_vector=True) for part in ("weight", "bias")}
