"""Ways in which a GGUF file may be wrong, drawn from a seed: structure, numbers, bytes, length."""

import copy
import struct
from collections.abc import Callable
from random import Random
from typing import TypeAlias

from gguf_parts import (
    ARRAY,
    BOOL,
    F32,
    F64,
    I32,
    LAYOUTS,
    STRING,
    U32,
    U64,
    Key,
    Parts,
    scalar,
    text,
)

Mutation: TypeAlias = Callable[[Parts, Random], None]

COUNTS = [0, 1, 2, 3, 5, 7, 31, 32, 33, 64, 127, 128, 255, 256, 257, 512, 1000, 1 << 16, 1 << 20]
COUNTS += [(1 << 26) - 1, 1 << 26, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]
HUGE = [1 << 40, 1 << 60, 1 << 63, (1 << 64) - 1]
NUMBERS = [0.0, -1.0, 1e-45, 1e-6, 0.5, 1.0, 1.001, 1e6, 1e16, 3e38]
NUMBERS += [float("inf"), float("-inf"), float("nan")]
OPTIONAL_KEYS = (
    "rope.dimension_count", "rope.freq_base", "rope.scaling.factor", "rope.scaling.type",
    "rope.scale_linear", "rope.scaling.original_context_length", "rope.scaling.yarn_ext_factor",
    "rope.scaling.attn_factor", "expert_count", "expert_used_count", "attention.sliding_window",
    "attention.sliding_window_pattern", "attn_logit_softcapping", "final_logit_softcapping",
    "attention.value_length",
)  # fmt: skip
ROOT_KEYS = (
    "general.alignment", "general.architecture", "split.count", "split.no", "split.tensors.count",
    "tokenizer.ggml.eos_token_id", "tokenizer.ggml.tokens",
)  # fmt: skip
WORDS = ["", "yarn", "linear", "none", "longrope", "llama", "gemma3", "qwen3moe", "\n\0"]


def another_value(parts: Parts, chance: Random) -> None:
    key = chance.choice(parts.keys)
    if key.kind in LAYOUTS:
        key.payload = drawn(key.kind, chance)


def another_type(parts: Parts, chance: Random) -> None:
    key = chance.choice(parts.keys)
    key.kind = chance.choice([U32, I32, F32, BOOL, STRING, U64, F64, 9, 13, 1 << 31])
    key.payload = drawn(key.kind, chance)


def an_array(parts: Parts, chance: Random) -> None:
    key = chance.choice(parts.keys)
    key.kind = ARRAY
    count = chance.choice([0, 1, 2, *HUGE])
    key.payload = struct.pack("<IQII", chance.choice([U32, F32, STRING, ARRAY]), count, 1, 2)


def a_key_too_few(parts: Parts, chance: Random) -> None:
    parts.keys.remove(chance.choice(parts.keys))


def a_key_too_many(parts: Parts, chance: Random) -> None:
    prefix = chance.choice(["llama", "qwen3moe", "gemma3"])
    names = [*(f"{prefix}.{name}" for name in OPTIONAL_KEYS), *ROOT_KEYS]
    kind = chance.choice([U32, F32, STRING, U64, I32, F64])
    parts.keys.append(Key(chance.choice(names), kind, drawn(kind, chance)))


def another_shape(parts: Parts, chance: Random) -> None:
    one = chance.choice(parts.tensors)
    match chance.randrange(4):
        case 0:
            one.axes[chance.randrange(len(one.axes))] = chance.choice(COUNTS + HUGE)
        case 1:
            one.axes.reverse()
        case 2:
            one.axes.append(chance.choice([0, 1, 2]))
        case _:
            one.axes = [chance.choice([1, 32, 64, 256])] * chance.randrange(6)


def another_kind(parts: Parts, chance: Random) -> None:
    chance.choice(parts.tensors).kind = chance.choice([*range(45), 1 << 31])


def another_place(parts: Parts, chance: Random) -> None:
    within = chance.randrange(len(parts.data)) // 32 * 32
    end = len(parts.data)
    chance.choice(parts.tensors).offset = chance.choice([0, 1, within, end - 32, end, *HUGE])


def another_name(parts: Parts, chance: Random) -> None:
    names = [one.name for one in parts.tensors] + ["", "\x1b[2J", "x" * 9999, "output.weight"]
    chance.choice(parts.tensors).name = chance.choice(names)


def a_tensor_too_few(parts: Parts, chance: Random) -> None:
    parts.tensors.remove(chance.choice(parts.tensors))


def other_counts(parts: Parts, chance: Random) -> None:
    parts.tensor_count = chance.choice([None, 0, len(parts.tensors) + 1, *HUGE])
    parts.key_count = chance.choice([None, 0, len(parts.keys) + 1, *HUGE])


def other_beginning(parts: Parts, chance: Random) -> None:
    parts.magic = chance.choice([b"GGUF", b"GGJT", b"\0\0\0\0", b"FUGG"])
    parts.version = chance.choice([0, 1, 2, 4, 3 << 24, (1 << 32) - 1])


def other_heads(parts: Parts, chance: Random) -> None:
    """Counts that still multiply to the shapes, so that the file may well be loaded."""
    heads = 1 << chance.randrange(9)
    width = 256 // heads
    counts = {"head_count": heads, "head_count_kv": max(1, 128 // width)}
    counts |= {"key_length": width, "value_length": width}
    for key in parts.keys:
        name = key.name.partition(".attention.")[2]
        if name in counts and key.kind == U32:
            key.payload = scalar(U32, counts[name])
    for one in parts.tensors:
        if one.name.endswith(("attn_q_norm.weight", "attn_k_norm.weight")):
            one.axes = [width]


def other_lengths(parts: Parts, chance: Random) -> None:
    names = ("context_length", "block_count", "expert_used_count", "sliding_window")
    found = [key for key in parts.keys if key.name.endswith(names) and key.kind == U32]
    if found:
        chance.choice(found).payload = scalar(U32, chance.choice(COUNTS))


def other_data(parts: Parts, chance: Random) -> None:
    data = bytearray(parts.data)
    for _ in range(chance.randint(1, 8)):
        data[chance.randrange(len(data))] = chance.choice([0, 0x7C, 0x7F, 0xFF])
    parts.data = bytes(data)


MUTATIONS: tuple[Mutation, ...] = (
    another_value, another_type, an_array, a_key_too_few, a_key_too_many, another_shape,
    another_kind, another_place, another_name, a_tensor_too_few, other_counts, other_beginning,
    other_heads, other_heads, other_lengths, other_lengths, other_data,
)  # fmt: skip


def drawn(kind: int, chance: Random) -> bytes:
    """A value of a type of metadata; of an unknown type, some bytes."""
    if kind == STRING:
        return text(chance.choice(WORDS))
    if kind in (F32, F64):
        return scalar(kind, chance.choice(NUMBERS))
    if kind == BOOL:
        return bytes([chance.choice([0, 1, 2, 255])])
    size = struct.calcsize(LAYOUTS.get(kind, "<I"))
    value = chance.choice(COUNTS if size <= 4 else COUNTS + HUGE)
    return value.to_bytes(8, "little")[:size]


def mutated(sound: Parts, seed: int) -> bytes:
    """The file with one to three things wrong, cut somewhere, or with some bits turned."""
    chance = Random(seed)
    way = chance.randrange(8)
    if way == 0:
        whole = sound.pack()
        return whole[: chance.randrange(len(whole))]
    if way == 1:
        damaged = bytearray(sound.pack())
        reach = chance.choice([64, 2048, len(damaged)])
        for _ in range(chance.randint(1, 5)):
            damaged[chance.randrange(reach)] ^= 1 << chance.randrange(8)
        return bytes(damaged)
    parts = copy.deepcopy(sound)
    for mutation in chance.sample(MUTATIONS, chance.randint(1, 3)):
        if parts.keys and parts.tensors and all(one.axes for one in parts.tensors):
            mutation(parts, chance)
    return parts.pack()
