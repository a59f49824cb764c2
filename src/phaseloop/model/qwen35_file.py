"""What a file of the Qwen 3.5 family says: its sizes, which layers recur, which tensors it has."""

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from phaseloop.ops.interface import Recurrence, Rope

from .shape import (
    LAYER_COUNT_MAX,
    WIDTH_MAX,
    Shape,
    expect_ends,
    read_rope,
    read_shape,
)
from .weights import OTHER, Expected, Weights

ATTENTION_INTERVAL = 4  # every fourth layer attends, if the file does not say otherwise
KERNEL_MAX = 64
SECTIONS = 4  # temporal, height, width, and one more that text does not use


class Hybrid(Struct, frozen=True):
    """`shape.layer_count` counts the layers that run; blocks that only draft come after them."""

    shape: Shape
    rope: Rope
    recurrence: Recurrence
    is_recurrent: tuple[bool, ...]
    shared_hidden: int  # of the shared expert; 0 where there are no experts
    draft_blocks: int


def block_name(index: int, part: str) -> str:
    return f"blk.{index}.{part}.weight"


def has_only_draft(weights: Weights, architecture: str) -> bool:
    """Whether a file has the block that drafts for a model, without that model."""
    drafts = weights.count(f"{architecture}.nextn_predict_layers", 0, LAYER_COUNT_MAX, 0)
    return drafts > 0 and block_name(0, "attn_norm") not in weights.tensors


def read_hybrid(weights: Weights, architecture: str) -> Hybrid:
    shape = read_shape(weights, architecture)
    blocks = shape.layer_count
    drafts = weights.count(f"{architecture}.nextn_predict_layers", 0, blocks, 0)
    shape = replace(shape, layer_count=blocks - drafts)
    if shape.key_length != shape.value_length:
        raise weights.error(
            f"key {architecture}.attention.value_length is {shape.value_length}, "
            f"but key_length is {shape.key_length}; they must be equal"
        )
    is_mixture = architecture.endswith("moe")
    if is_mixture != bool(shape.expert_count):
        wanted = "a mixture needs experts" if is_mixture else "this architecture has none"
        raise weights.error(f"key {architecture}.expert_count is {shape.expert_count}; {wanted}")
    is_recurrent = read_layer_kinds(weights, architecture, shape.layer_count, blocks)
    rope = read_rope(weights, architecture, shape, "halves")
    check_sections(weights, f"{architecture}.rope.dimension_sections", rope)
    shared = f"{architecture}.expert_shared_feed_forward_length"
    return Hybrid(
        shape=shape,
        rope=rope,
        recurrence=read_recurrence(weights, architecture, is_recurrent.count(True)),
        is_recurrent=is_recurrent,
        shared_hidden=weights.count(shared, 1, WIDTH_MAX, shape.hidden) if is_mixture else 0,
        draft_blocks=drafts,
    )


def read_recurrence(weights: Weights, architecture: str, layer_count: int) -> Recurrence:
    key = f"{architecture}.ssm."
    sizes = Recurrence(
        layer_count=layer_count,
        key_heads=weights.count(f"{key}group_count", 1, WIDTH_MAX),
        value_heads=weights.count(f"{key}time_step_rank", 1, WIDTH_MAX),
        width=weights.count(f"{key}state_size", 1, WIDTH_MAX),
        kernel=weights.count(f"{key}conv_kernel", 2, KERNEL_MAX),
    )
    if sizes.value_heads % sizes.key_heads:
        raise weights.error(
            f"key {key}group_count is {sizes.key_heads}, which does not divide the "
            f"{sizes.value_heads} value heads of {key}time_step_rank"
        )
    inner = weights.count(f"{key}inner_size", 1, WIDTH_MAX)
    if inner != sizes.value_heads * sizes.width:
        raise weights.error(
            f"key {key}inner_size is {inner}, not the {sizes.value_heads} heads of "
            f"{key}time_step_rank by the {sizes.width} of {key}state_size"
        )
    return sizes


def read_layer_kinds(
    weights: Weights, architecture: str, layer_count: int, block_count: int
) -> tuple[bool, ...]:
    """For each layer that runs, whether it recurs.  There must be some of either kind."""
    key = f"{architecture}.attention.recurrent_layers"
    stated = weights.metadata.get(key)
    if stated is None:
        interval = weights.count(
            f"{architecture}.full_attention_interval", 2, LAYER_COUNT_MAX, ATTENTION_INTERVAL
        )
        kinds = tuple((index + 1) % interval != 0 for index in range(layer_count))
    else:
        flags = np.asarray(stated)
        if flags.shape != (block_count,) or flags.dtype != np.bool_:
            raise weights.error(f"key {key} is not a list of {block_count} times true or false")
        kinds = tuple(bool(flag) for flag in flags[:layer_count])
    if len(set(kinds)) != 2:
        what = "no layer attends" if all(kinds) else "no layer recurs"
        raise weights.error(f"of its {layer_count} layers, {what}: this is not supported", OTHER)
    return kinds


def check_sections(weights: Weights, key: str, rope: Rope) -> None:
    """How pairs are shared among a position's axes.  Text has one value for all axes.

    So nothing depends on them here; but a file in which they make no sense is a broken one.
    """
    stated = weights.metadata.get(key)
    if stated is None:
        raise weights.error(f"key {key} is missing")
    sections = np.asarray(stated)
    if sections.shape != (SECTIONS,) or sections.dtype.kind not in "iu":
        raise weights.error(f"key {key} is not a list of {SECTIONS} integers")
    pairs = rope.dimensions // 2
    if sections.min() < 0 or not 0 < sections.sum() <= pairs:
        raise weights.error(
            f"key {key} is {sections.tolist()}, which does not share out {pairs} pairs"
        )


# --- tensors --------------------------------------------------------------------------------------


def expected_tensors(weights: Weights, hybrid: Hybrid) -> dict[str, Expected]:
    expected = expect_ends(hybrid.shape, hybrid.rope)
    for index, is_recurrent in enumerate(hybrid.is_recurrent):
        if is_recurrent:
            expected |= expect_delta(hybrid, index)
        else:
            expected |= expect_gated_attention(weights, hybrid.shape, index)
        expected |= expect_norms_and_feed(weights, hybrid, index)
    return expected | expect_draft_blocks(weights, hybrid)


def expect_draft_blocks(weights: Weights, hybrid: Hybrid) -> dict[str, Expected]:
    expected: dict[str, Expected] = {}
    trunk = hybrid.shape.layer_count
    for index in range(trunk, trunk + hybrid.draft_blocks):
        expected |= expect_gated_attention(weights, hybrid.shape, index)
        expected |= expect_norms_and_feed(weights, hybrid, index)
        expected |= expect_draft_parts(hybrid.shape, index)
    return expected


def expect_gated_attention(weights: Weights, shape: Shape, index: int) -> dict[str, Expected]:
    """Some files have queries, keys and values in one matrix."""
    heads, keys = (n * shape.key_length for n in (shape.head_count, shape.kv_head_count))
    fused = block_name(index, "attn_qkv")
    parts = {"q": 2 * heads, "k": keys, "v": keys}
    if fused in weights.tensors:
        expected = {fused: Expected((sum(parts.values()), shape.width))}
    else:
        expected = {
            block_name(index, f"attn_{part}"): Expected((rows, shape.width))
            for part, rows in parts.items()
        }
    for part in "qk":
        expected[block_name(index, f"attn_{part}_norm")] = vector(shape.key_length)
    expected[block_name(index, "attn_output")] = Expected((shape.width, heads))
    return expected


def expect_delta(hybrid: Hybrid, index: int) -> dict[str, Expected]:
    sizes, width = hybrid.recurrence, hybrid.shape.width
    inner = sizes.value_heads * sizes.width
    return {
        block_name(index, "attn_qkv"): Expected((sizes.channels, width)),
        block_name(index, "attn_gate"): Expected((inner, width)),
        block_name(index, "ssm_conv1d"): Expected((sizes.channels, sizes.kernel), is_vector=True),
        f"blk.{index}.ssm_dt.bias": vector(sizes.value_heads),
        f"blk.{index}.ssm_a": vector(sizes.value_heads),
        block_name(index, "ssm_beta"): Expected((sizes.value_heads, width)),
        block_name(index, "ssm_alpha"): Expected((sizes.value_heads, width)),
        block_name(index, "ssm_norm"): vector(sizes.width),
        block_name(index, "ssm_out"): Expected((width, inner)),
    }


def expect_norms_and_feed(weights: Weights, hybrid: Hybrid, index: int) -> dict[str, Expected]:
    shape = hybrid.shape
    norms = {
        block_name(index, f"{part}_norm"): vector(shape.width)
        for part in ("attn", "post_attention")
    }
    if not shape.expert_count:
        return norms | expect_gated("", index, shape.width, shape.hidden)
    both, expert_count = block_name(index, "ffn_gate_up_exps"), shape.expert_count
    routed = expect_gated("_exps", index, shape.width, shape.hidden, expert_count)
    if both in weights.tensors:
        for part in ("gate", "up"):
            del routed[block_name(index, f"ffn_{part}_exps")]
        routed[both] = Expected((expert_count, 2 * shape.hidden, shape.width))
    routed[block_name(index, "ffn_gate_inp")] = Expected((expert_count, shape.width))
    routed[block_name(index, "ffn_gate_inp_shexp")] = Expected((shape.width,))
    return norms | routed | expect_gated("_shexp", index, shape.width, hybrid.shared_hidden)


def expect_gated(
    suffix: str, index: int, width: int, hidden: int, *leading: int
) -> dict[str, Expected]:
    inner, outer = (*leading, hidden, width), (*leading, width, hidden)
    shapes = {"gate": inner, "up": inner, "down": outer}
    return {
        block_name(index, f"ffn_{part}{suffix}"): Expected(shape) for part, shape in shapes.items()
    }


def expect_draft_parts(shape: Shape, index: int) -> dict[str, Expected]:
    width, table = shape.width, (shape.vocabulary, shape.width)

    def name(part: str) -> str:
        return block_name(index, f"nextn.{part}")

    return {
        name("eh_proj"): Expected((width, 2 * width)),
        name("enorm"): vector(width),
        name("hnorm"): vector(width),
        name("embed_tokens"): Expected(table, is_optional=True),
        name("shared_head_head"): Expected(table, is_optional=True),
        name("shared_head_norm"): Expected((width,), is_vector=True, is_optional=True),
    }


def vector(size: int) -> Expected:
    return Expected((size,), is_vector=True)
