"""Writes tiny DFlash drafters of random, seeded weights, and a model of one answer."""

import numpy as np
from hybrid_files import hybrid_file
from synthetic import VOCABULARY, WIDTH, ModelFile, decoder_file

MASK, SAID = 11, 42  # the token that stands for one to be filled in; the only answer


def dflash_file(
    kind: str = "F32", *, layers: int = 2, ends: bool = False, seed: int = 1, **metadata: object
) -> ModelFile:
    """Reads two layers' inputs.  `ends`: with an embedding and a head of its own."""
    file = decoder_file("dflash", kind, head_norms=True, layers=layers, seed=seed)
    file.metadata |= {"block_size": 6, "target_layers": [3, 1]} | metadata
    file.root["tokenizer.ggml.mask_token_id"] = MASK
    if not ends:
        del file.tensors["token_embd.weight"], file.tensors["output.weight"]
    file.matrix("fc.weight", WIDTH, WIDTH * len(file.metadata["target_layers"]))
    file.vector("enc.output_norm.weight", WIDTH)
    return file


def with_token_ids(file: ModelFile, ids: list[int]) -> ModelFile:
    """A head for these of the target's tokens alone."""
    file.tensors["d2t"] = np.array(ids, np.int64), "I64"
    values, kind = file.tensors["output.weight"]
    file.tensors["output.weight"] = values[ids], kind
    return file


def sure_file(**options: object) -> ModelFile:
    """A hybrid that says one token whatever it is asked: every embedding has a part of it."""
    file = hybrid_file(**options)
    embedding, kind = file.tensors["token_embd.weight"]
    common = np.ones(WIDTH)
    file.tensors["token_embd.weight"] = embedding * 0.2 + common, kind
    head, kind = file.tensors["output.weight"]
    head = head - head.mean(axis=1, keepdims=True)
    head[SAID] = 0.1 * common
    file.tensors["output.weight"] = head, kind
    for name, (values, kind) in list(file.tensors.items()):
        if any(f".{part}." in name for part in ("attn_output", "ssm_out", "ffn_down")):
            file.tensors[name] = 0.05 * values, kind
    file.tensors["output_norm.weight"] = np.ones(WIDTH), "F32"
    return file


def agreeing(file: ModelFile, share: float) -> ModelFile:
    """Layers that add `share` of what they did, so that the embedding speaks for itself."""
    for name, (values, kind) in list(file.tensors.items()):
        if any(f".{part}." in name for part in ("attn_output", "ffn_down")):
            file.tensors[name] = share * values, kind
    file.tensors["output_norm.weight"] = np.ones(WIDTH), "F32"
    return file


assert max(MASK, SAID) < VOCABULARY
