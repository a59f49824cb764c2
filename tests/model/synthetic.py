"""Writes tiny GGUF models of random, seeded weights: real files, in every way but their sense."""

import ctypes
from pathlib import Path

import ggml
import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter

WIDTH, HIDDEN, LAYERS, VOCABULARY = 256, 256, 2, 160
HEADS, KV_HEADS, HEAD_WIDTH = 4, 2, 64
EXPERTS, EXPERTS_USED = 4, 2


SLOW = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")  # to quantise


def quantised(values: np.ndarray, kind: str) -> np.ndarray:
    """Bytes of `values` [N, D] in the type, by ggml's quantiser; any bytes where that is slow."""
    if kind == "F32":
        return values.astype(np.float32)
    if kind == "I64":
        return values.astype(np.int64)
    if kind in ("F16", "BF16"):
        return gguf.quants.quantize(values.astype(np.float32), GGMLQuantizationType[kind])
    rows = np.ascontiguousarray(values.reshape(-1, values.shape[-1]), np.float32)
    packed = any_blocks(rows, kind) if kind in SLOW else packed_by_ggml(rows, kind)
    return packed.reshape(*values.shape[:-1], -1)


def packed_by_ggml(rows: np.ndarray, kind: str) -> np.ndarray:
    number, (count, width) = int(GGMLQuantizationType[kind]), rows.shape
    packed = np.zeros((count, ggml.ggml_row_size(number, width)), np.uint8)
    floats = rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    target = ctypes.c_void_p(packed.ctypes.data)
    ggml.ggml_quantize_chunk(number, floats, target, 0, count, width, None)
    return packed


def any_blocks(rows: np.ndarray, kind: str) -> np.ndarray:
    """Random bits are a valid block of these types, once its scale gives the values their size."""
    number = GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[number]
    random = np.random.default_rng(rows.view(np.uint32).ravel()[:8].tolist())
    blocks = random.integers(0, 256, (rows.size // block, size), np.uint8)
    set_scale(blocks, kind, 1.0)
    deviation = gguf.quants.dequantize(blocks[:64], number).std()
    set_scale(blocks, kind, rows.std() / deviation)
    return blocks.reshape(len(rows), -1)


def set_scale(blocks: np.ndarray, kind: str, scale: float) -> None:
    bits = int(np.float16(scale).view(np.uint16))
    if kind != "IQ1_M":
        blocks[:, 0], blocks[:, 1] = bits & 0xFF, bits >> 8
        return
    for nibble in range(4):  # in the top bits of four words
        high = blocks[:, 49 + 2 * nibble]
        high[:] = (high & 0x0F) | (bits >> 4 * nibble & 0xF) << 4


class ModelFile:
    """Collects metadata and tensors, then writes them."""

    def __init__(self, architecture: str, kind: str = "F32", seed: int = 0) -> None:
        self.architecture = architecture
        self.kind = kind
        self.random = np.random.default_rng(seed)
        self.metadata: dict[str, object] = {}  # below the architecture's name
        self.root: dict[str, object] = {}
        self.tensors: dict[str, tuple[np.ndarray, str]] = {}

    def matrix(self, name: str, *shape: int, kind: str | None = None) -> None:
        values = self.random.standard_normal(shape) / np.sqrt(shape[-1])
        self.tensors[name] = values, kind or self.kind

    def vector(self, name: str, size: int, around: float = 1.0) -> None:
        self.tensors[name] = around + 0.2 * self.random.standard_normal(size), "F32"

    def write(self, path: Path) -> Path:
        writer = GGUFWriter(path, self.architecture)
        named = {f"{self.architecture}.{key}": value for key, value in self.metadata.items()}
        for full, value in (named | self.root).items():
            if isinstance(value, str):
                writer.add_string(full, value)
            elif isinstance(value, bool):
                writer.add_bool(full, value)
            elif isinstance(value, float):
                writer.add_float32(full, value)
            elif isinstance(value, list):
                writer.add_array(full, value)
            else:
                writer.add_uint32(full, value)
        for name, (values, kind) in self.tensors.items():
            writer.add_tensor(name, quantised(values, kind), raw_dtype=GGMLQuantizationType[kind])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def decoder_file(
    architecture: str,
    kind: str = "F32",
    *,
    tied: bool = False,
    biases: bool = False,
    head_norms: bool = False,
    kv_heads: int = KV_HEADS,
    rope: dict[str, object] | None = None,
    rope_factors: bool = False,
    experts: bool = False,
    layers: int = LAYERS,
    seed: int = 0,
) -> ModelFile:
    file = ModelFile(architecture, kind, seed)
    file.metadata |= {
        "context_length": 512,
        "embedding_length": WIDTH,
        "block_count": layers,
        "feed_forward_length": HIDDEN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": HEAD_WIDTH,
        "attention.value_length": HEAD_WIDTH,
        "attention.layer_norm_rms_epsilon": 1e-5,
        **(rope or {}),
    }
    file.matrix("token_embd.weight", VOCABULARY, WIDTH)
    if not tied:
        file.matrix("output.weight", VOCABULARY, WIDTH)
    file.vector("output_norm.weight", WIDTH)
    if rope_factors:
        file.tensors["rope_freqs.weight"] = np.linspace(1.0, 8.0, HEAD_WIDTH // 2), "F32"
    if experts:
        file.metadata |= {
            "expert_count": EXPERTS,
            "expert_used_count": EXPERTS_USED,
            "expert_feed_forward_length": HIDDEN,
        }
    for index in range(layers):
        add_attention(file, index, kv_heads, biases, head_norms)
        add_feed(file, index, experts)
    return file


def gemma_file(kind: str = "F32", **metadata: object) -> ModelFile:
    """Seven layers, so that the default pattern has one that sees all; a window of 20."""
    file = decoder_file("gemma3", kind, tied=True, head_norms=True, layers=7)
    file.metadata |= {"attention.sliding_window": 20, "rope.freq_base": 1e6} | metadata
    for index in range(7):
        for part in ("attention", "ffw"):
            file.vector(f"blk.{index}.post_{part}_norm.weight", WIDTH)
    return file


def add_attention(
    file: ModelFile, index: int, kv_heads: int, biases: bool, head_norms: bool
) -> None:
    block = f"blk.{index}."
    sizes = {"q": HEADS * HEAD_WIDTH, "k": kv_heads * HEAD_WIDTH, "v": kv_heads * HEAD_WIDTH}
    file.vector(f"{block}attn_norm.weight", WIDTH)
    for part, size in sizes.items():
        file.matrix(f"{block}attn_{part}.weight", size, WIDTH)
        if biases:
            file.vector(f"{block}attn_{part}.bias", size, 0.1)
    file.matrix(f"{block}attn_output.weight", WIDTH, HEADS * HEAD_WIDTH)
    if head_norms:
        file.vector(f"{block}attn_q_norm.weight", HEAD_WIDTH)
        file.vector(f"{block}attn_k_norm.weight", HEAD_WIDTH)


def add_feed(file: ModelFile, index: int, experts: bool) -> None:
    block = f"blk.{index}."
    file.vector(f"{block}ffn_norm.weight", WIDTH)
    suffix, leading = ("_exps", (EXPERTS,)) if experts else ("", ())
    if experts:
        file.matrix(f"{block}ffn_gate_inp.weight", EXPERTS, WIDTH, kind="F32")
    file.matrix(f"{block}ffn_gate{suffix}.weight", *leading, HIDDEN, WIDTH)
    file.matrix(f"{block}ffn_up{suffix}.weight", *leading, HIDDEN, WIDTH)
    file.matrix(f"{block}ffn_down{suffix}.weight", *leading, WIDTH, HIDDEN)
