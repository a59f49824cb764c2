"""Writes hybrids whose next token is known, with a block that drafts and knows it."""

import numpy as np
from hybrid_files import hybrid_file
from synthetic import VOCABULARY, WIDTH, ModelFile

# What follows each token; the last one, which ends texts in some files, follows nothing else.
TURN = np.append(np.random.default_rng(4).permutation(VOCABULARY - 1), VOCABULARY - 1)
GAIN = 0.15  # likely enough to be greedy's choice, and not sure when hot
SILENT = ("attn_output", "ssm_out", "ffn_down")


def knowing_file(source: str) -> ModelFile:
    """Tokens are unit vectors, the head turns them, layers add nothing; so does the block."""
    file = hybrid_file(draft=True)
    for name, (values, kind) in list(file.tensors.items()):
        if any(f".{part}." in name for part in SILENT):
            file.tensors[name] = np.zeros_like(values), kind
        if name.split(".")[-2] in ("output_norm", "enorm", "hnorm", "shared_head_norm"):
            file.tensors[name] = np.ones_like(values), kind
    units, turn = np.eye(VOCABULARY, WIDTH), np.zeros((WIDTH, WIDTH))
    turn[TURN, np.arange(VOCABULARY)] = 1.0
    file.tensors["token_embd.weight"] = units, "F32"
    file.tensors["output.weight"] = GAIN * units @ turn, "F32"  # row TURN[v] meets v
    parts = {"token": (np.eye(WIDTH), 0 * turn), "hidden": (0 * turn, turn)}
    file.tensors["blk.4.nextn.eh_proj.weight"] = np.concatenate(parts[source], axis=1), "F32"
    return file
