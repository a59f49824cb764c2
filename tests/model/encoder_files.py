"""Writes tiny encoders: BERT and its kin, with or without a classifier, and their vocabulary."""

from synthetic import ModelFile

WIDTH, HIDDEN, LAYERS, HEADS, POSITIONS = 64, 96, 2, 4, 128
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,!?-'"
WORDS = ("the", "cat", "sat", "on", "a", "mat", "dog", "barks", "rain", "falls", "in", "spring")
PIECES = (*(f"▁{word}" for word in WORDS), *(f"▁{one}" for one in LETTERS), *LETTERS, "ing", "s!")
TOKENS = list(dict.fromkeys((*SPECIAL, *PIECES)))
VOCABULARY = len(TOKENS)
CLS, SEP = 2, 3
TYPE_NORMAL, TYPE_CONTROL = 1, 3


def encoder_file(
    architecture: str = "bert",
    kind: str = "F32",
    *,
    fused: bool = False,
    biases: bool = True,
    types: bool = True,
    labels: int = 0,
    dense: bool = True,
    width: int = WIDTH,
    pooling: int | None = 1,
    seed: int = 0,
) -> ModelFile:
    """`labels`: of a classifier; 0: there is none.  `dense`: whether one has a layer before."""
    file = ModelFile(architecture, kind, seed)
    file.metadata |= {
        "context_length": POSITIONS,
        "embedding_length": width,
        "block_count": LAYERS,
        "feed_forward_length": HIDDEN if width == WIDTH else width,
        "attention.head_count": HEADS,
        "attention.layer_norm_epsilon": 1e-6,
        "attention.causal": False,
    }
    if pooling is not None:
        file.metadata["pooling_type"] = pooling
    add_vocabulary(file)
    file.matrix("token_embd.weight", VOCABULARY, width)
    if types:
        file.matrix("token_types.weight", 2, width, kind="F32")
    if architecture == "bert":
        file.matrix("position_embd.weight", POSITIONS, width, kind="F32")
    add_norm(file, "token_embd_norm", width)
    for index in range(LAYERS):
        add_layer(file, index, fused, biases)
    if labels:
        add_classifier(file, width, labels, dense)
    return file


def add_vocabulary(file: ModelFile) -> None:
    file.root |= {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [
            TYPE_CONTROL if text in SPECIAL else TYPE_NORMAL for text in TOKENS
        ],
        "tokenizer.ggml.bos_token_id": CLS,
        "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.seperator_token_id": SEP,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.cls_token_id": CLS,
        "tokenizer.ggml.mask_token_id": 4,
        "tokenizer.ggml.token_type_count": 2,
    }


def add_layer(file: ModelFile, index: int, fused: bool, biases: bool) -> None:
    block, width = f"blk.{index}.", file.metadata["embedding_length"]
    hidden = file.metadata["feed_forward_length"]
    parts = {"attn_qkv": (3 * width, width)} if fused else {}
    if not fused:
        parts |= {f"attn_{part}": (width, width) for part in "qkv"}
    parts |= {"attn_output": (width, width), "ffn_up": (hidden, width), "ffn_down": (width, hidden)}
    if file.architecture != "bert":
        parts["ffn_gate"] = (hidden, width)
    for name, shape in parts.items():
        file.matrix(f"{block}{name}.weight", *shape)
        if biases:
            file.vector(f"{block}{name}.bias", shape[0], 0.1)
    add_norm(file, f"{block}attn_output_norm", width)
    add_norm(file, f"{block}layer_output_norm", width)


def add_norm(file: ModelFile, name: str, width: int) -> None:
    file.vector(f"{name}.weight", width)
    file.vector(f"{name}.bias", width, 0.1)


def add_classifier(file: ModelFile, width: int, labels: int, dense: bool) -> None:
    if dense:
        file.matrix("cls.weight", width, width, kind="F32")
        file.vector("cls.bias", width, 0.0)
    file.matrix("cls.output.weight", labels, width, kind="F32")
    file.vector("cls.output.bias", labels, 0.0)
    if labels > 1:
        key = f"{file.architecture}.classifier.output_labels"
        file.root[key] = [f"label {number}" for number in range(labels)]
