"""Goal: the CUDA backend computes what the formulas say, for every family and type of weights.

Method: tiny random models on the host's shim; logits of two prompts, of one generated token and of
two drafted ones, against the float64 reference.  The measure is the squared error relative to the
squared logits.  Kernels round activations, keys and values to halves, which leaves 1e-6 in a dense
model of two layers, and some more where rows recur; a wrong formula leaves 0.01 and more, as the
negative tests show.
"""

import numpy as np
import pytest

pytest.importorskip("gguf")
pytest.importorskip("ggml")

from cuda_models import FAMILIES, generated, opened, prompt, tokens
from synthetic import decoder_file

TOLERANCE = 4e-6
TOLERANCE_RECURRENT = 4e-5
PACKED = ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
          "IQ4_NL", "IQ4_XS", "MXFP4")  # fmt: skip


def logits_of(backend, ids=None):
    ids = tokens(40) if ids is None else ids
    prompts = [prompt(0, 0, ids[:30], 3), prompt(2, 0, ids[30:])]
    answers = [generated(0, 30, 7), generated(2, 10, 9, 11)]
    return np.concatenate([backend.forward(prompts), backend.forward(answers)])


def measure(found, exact):
    return float(np.square(found - exact).sum() / np.square(exact).sum())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family, tmp_path):
    tiny = opened(FAMILIES[family]("Q8_0"), tmp_path)
    backend = tiny.cuda()
    exact = logits_of(tiny.reference())
    tolerance = TOLERANCE_RECURRENT if "qwen35" in family else TOLERANCE
    assert measure(logits_of(backend), exact) < tolerance
    backend.close()


@pytest.mark.parametrize("kind", PACKED)
def test_every_type(kind, tmp_path):
    tiny = opened(decoder_file("llama", kind, layers=1), tmp_path)
    backend = tiny.cuda()
    assert measure(logits_of(backend), logits_of(tiny.reference())) < 3 * TOLERANCE
    backend.close()
