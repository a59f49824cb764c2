"""A file with the metadata and the tensor table of Qwen3.8-27B, and holes for its weights.

Sizes are those that its makers and llama.cpp's loader state; the mix of types is that of a Q5_K
file: Q6_K for values, the down projections and the head, F32 for what is small.
"""

from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter

WIDTH, HIDDEN, VOCABULARY, LAYERS = 5120, 17408, 248_320, 64
HEADS, KV_HEADS, HEAD_WIDTH = 24, 4, 256
KEY_HEADS, VALUE_HEADS, STATE, KERNEL = 16, 48, 128, 4
INNER, CHANNELS = VALUE_HEADS * STATE, (2 * KEY_HEADS + VALUE_HEADS) * STATE
METADATA: dict[str, object] = {
    "block_count": LAYERS + 1,
    "context_length": 262_144,
    "embedding_length": WIDTH,
    "feed_forward_length": HIDDEN,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.key_length": HEAD_WIDTH,
    "attention.value_length": HEAD_WIDTH,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 1e7,
    "rope.dimension_count": 64,
    "rope.dimension_sections": [11, 11, 10, 0],
    "ssm.conv_kernel": KERNEL,
    "ssm.inner_size": INNER,
    "ssm.state_size": STATE,
    "ssm.time_step_rank": VALUE_HEADS,
    "ssm.group_count": KEY_HEADS,
    "full_attention_interval": 4,
    "nextn_predict_layers": 1,
}
Table = dict[str, tuple[tuple[int, ...], str]]  # name -> row-major shape, type


def table() -> Table:
    found: Table = {
        "token_embd.weight": ((VOCABULARY, WIDTH), "Q5_K"),
        "output.weight": ((VOCABULARY, WIDTH), "Q6_K"),
        "output_norm.weight": ((WIDTH,), "F32"),
    }
    for index in range(LAYERS):
        found |= prefixed(index, {**(full() if (index + 1) % 4 == 0 else delta()), **feed()})
    draft = {
        "nextn.eh_proj.weight": ((WIDTH, 2 * WIDTH), "Q5_K"),
        **{f"nextn.{part}.weight": ((WIDTH,), "F32")
           for part in ("enorm", "hnorm", "shared_head_norm")},
    }  # fmt: skip
    return found | prefixed(LAYERS, {**full(), **feed(), **draft})


def prefixed(index: int, parts: Table) -> Table:
    return {f"blk.{index}.{name}": part for name, part in parts.items()}


def full() -> Table:
    return {
        "attn_q.weight": ((2 * HEADS * HEAD_WIDTH, WIDTH), "Q5_K"),
        "attn_k.weight": ((KV_HEADS * HEAD_WIDTH, WIDTH), "Q5_K"),
        "attn_v.weight": ((KV_HEADS * HEAD_WIDTH, WIDTH), "Q6_K"),
        "attn_q_norm.weight": ((HEAD_WIDTH,), "F32"),
        "attn_k_norm.weight": ((HEAD_WIDTH,), "F32"),
        "attn_output.weight": ((WIDTH, HEADS * HEAD_WIDTH), "Q5_K"),
    }


def delta() -> Table:
    return {
        "attn_qkv.weight": ((CHANNELS, WIDTH), "Q5_K"),
        "attn_gate.weight": ((INNER, WIDTH), "Q5_K"),
        "ssm_conv1d.weight": ((CHANNELS, KERNEL), "F32"),
        "ssm_dt.bias": ((VALUE_HEADS,), "F32"),
        "ssm_a": ((VALUE_HEADS,), "F32"),
        "ssm_beta.weight": ((VALUE_HEADS, WIDTH), "Q5_K"),
        "ssm_alpha.weight": ((VALUE_HEADS, WIDTH), "Q5_K"),
        "ssm_norm.weight": ((STATE,), "F32"),
        "ssm_out.weight": ((WIDTH, INNER), "Q5_K"),
    }


def feed() -> Table:
    return {
        "attn_norm.weight": ((WIDTH,), "F32"),
        "post_attention_norm.weight": ((WIDTH,), "F32"),
        "ffn_gate.weight": ((HIDDEN, WIDTH), "Q5_K"),
        "ffn_up.weight": ((HIDDEN, WIDTH), "Q5_K"),
        "ffn_down.weight": ((WIDTH, HIDDEN), "Q6_K"),
    }


def bytes_of(shape: tuple[int, ...], kind: str) -> int:
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return int(np.prod(shape)) // block * block_bytes


def write(path: Path) -> Path:
    """Sparse: some megabytes of disk for 20 GB of file."""
    writer = GGUFWriter(path, "qwen35")
    for key, value in METADATA.items():
        name = f"qwen35.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_uint32(name, value)
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_string("tokenizer.ggml.pre", "qwen35")
    writer.add_array("tokenizer.ggml.tokens", [f"t{index}" for index in range(VOCABULARY)])
    writer.add_array("tokenizer.ggml.merges", ["t 0"])
    writer.add_uint32("tokenizer.ggml.eos_token_id", VOCABULARY - 1)
    end = 0
    for name, (shape, kind) in table().items():
        raw, size = GGMLQuantizationType[kind], bytes_of(shape, kind)
        block, block_bytes = GGML_QUANT_SIZES[raw]
        stored = shape if kind == "F32" else (*shape[:-1], shape[-1] // block * block_bytes)
        dtype = np.dtype(np.float32 if kind == "F32" else np.uint8)
        writer.add_tensor_info(name, stored, dtype, size, raw_dtype=raw)
        end += -(-size // 32) * 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    head = -(-path.stat().st_size // 32) * 32
    with path.open("r+b") as file:
        file.truncate(head + end)
    return path
