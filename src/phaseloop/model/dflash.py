"""DFlash: a small network that drafts a whole block of tokens in one pass.

It has two ways through.  Rows of the model's hidden rows, those of several layers' inputs side by
side, become keys and values of every layer, at the positions of their tokens.  A block, which is
the last token and behind it so many masks, attends to these and to all of itself; what comes out
at a mask is the token that belongs there.
"""

from msgspec import Struct
from msgspec.structs import replace

from phaseloop.ops.interface import Attention, Ops, Tensor

from .decoder import AttentionLayer, Layer, attend, attention_layer, feed, feed_layer
from .dflash_file import (
    ENCODER_NORM,
    FUSE,
    DflashFile,
    expected_tensors,
    read_dflash,
)
from .draft import Draft
from .shape import EMBEDDING, HEAD, OUTPUT_NORM, dimensions_of, score_scale
from .weights import Weights


class Dflash(Struct, frozen=True):
    layers: tuple[Layer, ...]
    head: str
    epsilon: float
    embedding_scale: float
    value_scale: float

    def __call__(self, ops: Ops[Tensor], /) -> Tensor:
        hidden = ops.given()
        if hidden is None:
            return self._draft(ops)
        fused = ops.rms_norm(ops.linear(FUSE, hidden), ENCODER_NORM, self.epsilon)
        for layer in self.layers:
            keep(ops, fused, layer.attention)
        return ops.linear(self.head, ops.outputs(fused))  # nobody wants these rows

    def _draft(self, ops: Ops[Tensor]) -> Tensor:
        x = ops.embed(EMBEDDING)
        if self.embedding_scale != 1.0:
            x = ops.scale(x, self.embedding_scale)
        for layer in self.layers:
            normed = ops.rms_norm(x, layer.attention_norm, self.epsilon)
            attended = attend(ops, normed, layer.attention)
            if self.value_scale != 1.0:
                attended = ops.scale(attended, self.value_scale)
            if layer is self.layers[-1]:
                x, attended = ops.outputs(x), ops.outputs(attended)
            x = ops.add(x, attended)
            x = ops.add(x, feed(ops, ops.rms_norm(x, layer.feed_norm, self.epsilon), layer.feed))
        return ops.linear(self.head, ops.final(ops.rms_norm(x, OUTPUT_NORM, self.epsilon)))


def keep(ops: Ops[Tensor], x: Tensor, layer: AttentionLayer) -> None:
    """[T, D]: only its keys and values."""
    k = ops.heads(ops.linear(layer.key, x, layer.key_bias), layer.kv_head_count)
    v = ops.heads(ops.linear(layer.value, x, layer.value_bias), layer.kv_head_count)
    assert layer.key_norm is not None, "checked at loading"
    k = ops.rope(ops.rms_norm(k, layer.key_norm, layer.epsilon), layer.rope)
    ops.keep(layer.index, k, v)


def dflash(weights: Weights, target: Weights) -> Draft:
    """What it has no tensors of its own for, embedding and head, it takes from its target.

    Raises ModelError where the file is not as it should be, or does not fit the target.
    """
    file = read_dflash(weights, target)
    shape = file.shape
    file.weights.check(expected_tensors(file))
    network = Dflash(
        layers=layers_of(file),
        head=HEAD if HEAD in file.weights.tensors else EMBEDDING,
        epsilon=shape.epsilon,
        embedding_scale=file.embedding_scale,
        value_scale=file.value_scale,
    )
    dimensions = dimensions_of(shape, (file.rope,) * shape.layer_count)
    return Draft(
        kind="draft-dflash",
        network=network,
        dimensions=replace(
            dimensions, given_width=file.given_width, output_width=len(file.token_ids or ())
        ),
        tensors=file.weights.tensors,
        taps=file.target_layers,
        block_length=file.block_length,
        mask=file.mask,
        token_ids=file.token_ids,
        sections=file.sections,
    )


def layers_of(file: DflashFile) -> tuple[Layer, ...]:
    shape, layers = file.shape, list[Layer]()
    spec = Attention(scale=score_scale(shape.key_length), causal=file.causal)
    if file.score_scale:
        spec = replace(spec, scale=file.score_scale)
    for index in range(shape.layer_count):
        window = file.windows[index]
        own = replace(spec, window=window)
        layers.append(
            Layer(
                attention_norm=f"blk.{index}.attn_norm.weight",
                attention=attention_layer(file.weights.tensors, shape, index, file.rope, own),
                feed_norm=f"blk.{index}.ffn_norm.weight",
                feed=feed_layer(shape, index),
            )
        )
    return tuple(layers)
