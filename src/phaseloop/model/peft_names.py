"""PEFT's names of modules, and what converters to GGUF call them and do to their weights.

Two families have rows in another order in GGUF than in the checkpoints that adapters are trained
on.  `llama`: of each head of queries and keys, the two halves that turn together alternate.
`qwen35`: value heads that share a key head do not lie beside each other but a round of key heads
apart.
"""

import re

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from .shape import EMBEDDING, HEAD, Model
from .weights import Weights

Index = NDArray[np.intp]
ROOTS = r"(?:model\.(?:language_model\.)?|language_model\.model\.)"
LAYER = re.compile(rf"{ROOTS}layers\.(?P<layer>\d{{1,4}})\.(?P<module>.+)")
EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(?P<expert>\d{1,5})\.(?P<part>\w+)")
ENDS = {EMBEDDING: re.compile(rf"{ROOTS}embed_tokens"), HEAD: re.compile(r"(?:.+\.)?lm_head")}
MODULES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.out_proj": "ssm_out",
}
EXPERT_PARTS = {
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps",
    "w3": "ffn_up_exps",
    "w2": "ffn_down_exps",
}


class Place(Struct, frozen=True):
    """A matrix of the model; of one expert where there are several in it."""

    weight: str
    expert: int | None = None


def place_of(module: str) -> Place | None:
    """Where a module's weights are in a GGUF file; None for a module that no family here has."""
    for weight, pattern in ENDS.items():
        if pattern.fullmatch(module):
            return Place(weight)
    found = LAYER.fullmatch(module)
    if found is None:
        return None
    block = f"blk.{int(found['layer'])}."
    expert = EXPERT.fullmatch(found["module"])
    if expert is not None and expert["part"] in EXPERT_PARTS:
        return Place(f"{block}{EXPERT_PARTS[expert['part']]}.weight", int(expert["expert"]))
    name = MODULES.get(found["module"])
    return None if name is None else Place(f"{block}{name}.weight")


def outputs_order(weight: str, base: Weights, model: Model) -> Index | None:
    """Which output of the checkpoint each output in the file is; None where they are the same."""
    part = weight.split(".")[-2]
    if model.architecture == "llama" and part in ("attn_q", "attn_k"):
        key = "head_count" if part == "attn_q" else "head_count_kv"
        queries = base.get("llama.attention.head_count", int)
        heads = base.get(f"llama.attention.{key}", int, queries)
        return alternated(base.tensors[weight].shape[0], heads)
    sizes = model.dimensions.recurrence
    if sizes is None:
        return None
    if part in ("ssm_alpha", "ssm_beta"):
        return tiled(sizes.key_heads, sizes.value_heads, 1)
    values = tiled(sizes.key_heads, sizes.value_heads, sizes.width)
    if part == "attn_gate":
        return values
    if part == "attn_qkv":
        keys = 2 * sizes.key_heads * sizes.width
        return np.concatenate((np.arange(keys), keys + values))
    return None


def inputs_order(weight: str, model: Model) -> Index | None:
    """As outputs_order, of a matrix's inputs."""
    sizes = model.dimensions.recurrence
    if sizes is None or weight.split(".")[-2] != "ssm_out":
        return None
    return tiled(sizes.key_heads, sizes.value_heads, sizes.width)


def alternated(size: int, heads: int) -> Index:
    """Of each head, the first of its one half, the first of the other, the second of the one..."""
    return np.arange(size).reshape(heads, 2, size // heads // 2).swapaxes(1, 2).reshape(-1)


def tiled(key_heads: int, value_heads: int, width: int) -> Index:
    """Value heads of one key head are neighbours; then those of one round of key heads are."""
    heads = np.arange(value_heads * width).reshape(key_heads, value_heads // key_heads, width)
    return heads.swapaxes(0, 1).reshape(-1)
