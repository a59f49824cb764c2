"""Writes tiny models of the Qwen 3.5 family, of random, seeded weights."""

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from synthetic import EXPERTS, EXPERTS_USED, HIDDEN, VOCABULARY, WIDTH, ModelFile

HEADS, KV_HEADS, HEAD_WIDTH = 4, 2, 64
KEY_HEADS, VALUE_HEADS, STATE, KERNEL = 2, 6, 32, 4
INNER = VALUE_HEADS * STATE
CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * STATE
SHARED_HIDDEN = 128
SIZES: dict[str, object] = {
    "context_length": 512,
    "embedding_length": WIDTH,
    "feed_forward_length": HIDDEN,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.key_length": HEAD_WIDTH,
    "attention.value_length": HEAD_WIDTH,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 1e7,
    "rope.dimension_count": 16,
    "rope.dimension_sections": [3, 3, 2, 0],
    "ssm.conv_kernel": KERNEL,
    "ssm.inner_size": INNER,
    "ssm.state_size": STATE,
    "ssm.time_step_rank": VALUE_HEADS,
    "ssm.group_count": KEY_HEADS,
    "full_attention_interval": 4,
}


def hybrid_file(
    kind: str = "F32",
    *,
    mixture: bool = False,
    layers: int = 4,
    draft: bool = False,
    fused: bool = False,
    tied: bool = False,
    vocabulary: int = VOCABULARY,
    seed: int = 0,
    **metadata: object,
) -> ModelFile:
    """By default three layers that recur and one that attends, and so on.

    `fused` joins the matrices that files may join; `draft` adds a block of multi-token prediction.
    """
    file = ModelFile("qwen35moe" if mixture else "qwen35", kind, seed)
    file.metadata |= SIZES | {"block_count": layers + draft}
    if mixture:
        file.metadata |= {
            "expert_count": EXPERTS,
            "expert_used_count": EXPERTS_USED,
            "expert_feed_forward_length": HIDDEN,
            "expert_shared_feed_forward_length": SHARED_HIDDEN,
        }
    if draft:
        file.metadata["nextn_predict_layers"] = 1
    file.metadata |= metadata
    recurs = file.metadata.get("attention.recurrent_layers") or [
        bool((index + 1) % file.metadata["full_attention_interval"]) for index in range(layers)
    ]
    file.matrix("token_embd.weight", vocabulary, WIDTH)
    if not tied:
        file.matrix("output.weight", vocabulary, WIDTH)
    file.vector("output_norm.weight", WIDTH)
    for index in range(layers):
        (add_delta if recurs[index] else add_attention)(file, index, fused)
        add_feed(file, index, mixture, fused)
    if draft:
        add_draft(file, layers, mixture, fused)
    return file


def add_attention(file: ModelFile, index: int, fused: bool) -> None:
    block = f"blk.{index}."
    sizes = {"q": 2 * HEADS * HEAD_WIDTH, "k": KV_HEADS * HEAD_WIDTH, "v": KV_HEADS * HEAD_WIDTH}
    if fused:
        file.matrix(f"{block}attn_qkv.weight", sum(sizes.values()), WIDTH)
    else:
        for part, size in sizes.items():
            file.matrix(f"{block}attn_{part}.weight", size, WIDTH)
    for part in "qk":
        file.vector(f"{block}attn_{part}_norm.weight", HEAD_WIDTH)
    file.matrix(f"{block}attn_output.weight", WIDTH, HEADS * HEAD_WIDTH)


def add_delta(file: ModelFile, index: int, _fused: bool = False) -> None:
    """Decays of all speeds, so that some heads remember long and some forget at once."""
    block = f"blk.{index}."
    file.matrix(f"{block}attn_qkv.weight", CHANNELS, WIDTH)
    file.matrix(f"{block}attn_gate.weight", INNER, WIDTH)
    file.matrix(f"{block}ssm_conv1d.weight", CHANNELS, KERNEL, kind="F32")
    file.vector(f"{block}ssm_dt.bias", VALUE_HEADS, 0.0)
    decay = -(10.0 ** file.random.uniform(-2.5, 0.5, VALUE_HEADS))
    file.tensors[f"{block}ssm_a"] = decay, "F32"
    file.matrix(f"{block}ssm_beta.weight", VALUE_HEADS, WIDTH)
    file.matrix(f"{block}ssm_alpha.weight", VALUE_HEADS, WIDTH)
    file.vector(f"{block}ssm_norm.weight", STATE)
    file.matrix(f"{block}ssm_out.weight", WIDTH, INNER, kind=narrow_kind(file.kind, INNER))


def add_feed(file: ModelFile, index: int, mixture: bool, fused: bool) -> None:
    block = f"blk.{index}."
    for part in ("attn", "post_attention"):
        file.vector(f"{block}{part}_norm.weight", WIDTH)
    if not mixture:
        add_gated(file, block, "", HIDDEN)
        return
    file.matrix(f"{block}ffn_gate_inp.weight", EXPERTS, WIDTH, kind="F32")
    file.vector(f"{block}ffn_gate_inp_shexp.weight", WIDTH, 0.0)
    add_gated(file, block, "_shexp", SHARED_HIDDEN)
    if fused:
        file.matrix(f"{block}ffn_gate_up_exps.weight", EXPERTS, 2 * HIDDEN, WIDTH)
        file.matrix(f"{block}ffn_down_exps.weight", EXPERTS, WIDTH, HIDDEN)
    else:
        add_gated(file, block, "_exps", HIDDEN, EXPERTS)


def add_gated(file: ModelFile, block: str, suffix: str, hidden: int, *leading: int) -> None:
    file.matrix(f"{block}ffn_gate{suffix}.weight", *leading, hidden, WIDTH)
    file.matrix(f"{block}ffn_up{suffix}.weight", *leading, hidden, WIDTH)
    kind = narrow_kind(file.kind, hidden)
    file.matrix(f"{block}ffn_down{suffix}.weight", *leading, WIDTH, hidden, kind=kind)


def narrow_kind(kind: str, width: int) -> str:
    """The kind, or one of small blocks where its own do not fit the width, as quantisers choose."""
    return kind if width % GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0] == 0 else "Q8_0"


def add_draft(file: ModelFile, index: int, mixture: bool, fused: bool) -> None:
    block = f"blk.{index}."
    add_attention(file, index, fused)
    add_feed(file, index, mixture, fused)
    file.matrix(f"{block}nextn.eh_proj.weight", WIDTH, 2 * WIDTH)
    for part in ("enorm", "hnorm", "shared_head_norm"):
        file.vector(f"{block}nextn.{part}.weight", WIDTH)


def with_words(file: ModelFile) -> ModelFile:
    """A tokenizer, so that the file can be served: token i is "ti", the last one ends a text."""
    file.root |= {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen35",
        "tokenizer.ggml.tokens": [*(f"t{i}" for i in range(VOCABULARY - 1)), "<end>"],
        "tokenizer.ggml.token_type": [1] * (VOCABULARY - 1) + [3],
        "tokenizer.ggml.merges": ["t 0"],
        "tokenizer.ggml.eos_token_id": VOCABULARY - 1,
    }
    return file
