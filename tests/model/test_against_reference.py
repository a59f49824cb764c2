"""Goal: ggml computes what the formulas say, for every weight type and variant of an architecture.

Method: tiny random models; the logits of two prompts and one generated token each, ggml against the
float64 reference.  The measure is the squared error relative to the squared logits.  ggml rounds
activations before it multiplies them: to 24 bits for F32 weights (what remains is the F16 cache),
to F16 or BF16 for those, to 8 bits for quantised ones.  An error in a formula moves the measure to
between 0.01 and 2: the negative tests show it.
"""

import numpy as np
import pytest

pytest.importorskip("gguf")
pytest.importorskip("ggml")

from synthetic import VOCABULARY, decoder_file, gemma_file

from phaseloop.model.load import load_model
from phaseloop.model.weights import open_weights
from phaseloop.ops.ggml import GgmlBackend
from phaseloop.ops.interface import Span
from phaseloop.ops.reference import ReferenceBackend

TOLERANCES = {"F32": 1e-5, "F16": 1e-4, "BF16": 3e-4}
TOLERANCE_QUANTISED = 4e-3
PACKED = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
    *("TQ1_0", "TQ2_0", "MXFP4", "NVFP4"),
)


def opened(file, path):
    weights = open_weights(file.write(path / "model.gguf"))
    weights.check_values()
    return weights, load_model(weights)


def logits_of(backend):
    tokens = np.random.default_rng(3).integers(0, VOCABULARY, 90).tolist()
    prompts = [Span(0, 0, tokens[:30], 3, False), Span(1, 0, tokens[30:], 1, False)]
    answers = [Span(0, 30, [7], 1, True), Span(1, 60, [9], 1, True)]
    return np.concatenate([backend.forward(prompts), backend.forward(answers)])


def reference(weights, model):
    return logits_of(
        ReferenceBackend(
            model.network, weights.tensors, model.dimensions, region_count=2, capacity=128
        )
    )


def ggml(weights, model, **options):
    backend = GgmlBackend(
        model.network,
        weights.tensors,
        model.dimensions,
        region_count=2,
        capacity=128,
        threads=1,
        **options,
    )
    assert backend.unstable_kinds == ()
    logits = logits_of(backend)
    backend.close()
    return logits


def error(true, found):
    return float(((true - found) ** 2).sum() / (true**2).sum())


def check(file, path, **options):
    weights, model = opened(file, path)
    tolerance = TOLERANCES.get(file.kind, TOLERANCE_QUANTISED)
    assert error(reference(weights, model), ggml(weights, model, **options)) < tolerance


@pytest.mark.parametrize("kind", [*TOLERANCES, *PACKED])
def test_every_weight_type(tmp_path, kind):
    check(decoder_file("llama", kind), tmp_path)


VARIANTS = {
    "tied": {"tied": True},
    "one_kv_head": {"kv_heads": 1},
    "no_grouping": {"kv_heads": 4},
    "biases": {"biases": True},
    "mixture": {"experts": True},
    "partial_rope": {"rope": {"rope.dimension_count": 32}},
    "rope_base": {"rope": {"rope.freq_base": 500_000.0}},
    "rope_linear": {"rope": {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}},
    "rope_linear_old": {"rope": {"rope.scale_linear": 4.0}},
    "rope_yarn": {
        "rope": {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 64,
        }
    },
    "rope_llama3": {"rope_factors": True},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_llama(tmp_path, name):
    check(decoder_file("llama", **VARIANTS[name]), tmp_path)


@pytest.mark.parametrize("kind", ["F32", "Q4_K"])
@pytest.mark.parametrize("tied", [False, True])
def test_qwen(tmp_path, kind, tied):
    (tmp_path / "2").mkdir()
    check(decoder_file("qwen2", kind, biases=True, tied=tied), tmp_path / "2")
    check(decoder_file("qwen3", kind, head_norms=True, tied=tied), tmp_path)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_qwen_mixtures(tmp_path, kind):
    check(decoder_file("qwen3moe", kind, head_norms=True, experts=True), tmp_path)


GEMMAS = {
    "plain": {},
    "window": {"attention.sliding_window": 8},
    "pattern": {"attention.sliding_window_pattern": 2},
    "local_base": {"rope.freq_base_swa": 50.0},
    "scaled": {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    "score_cap": {"attn_logit_softcapping": 0.5},
    "logit_cap": {"final_logit_softcapping": 2.0},
}


@pytest.mark.parametrize("name", GEMMAS)
def test_gemma(tmp_path, name):
    """ggml reads gelu from a table over F16, so even F32 weights leave an error of that size."""
    weights, model = opened(gemma_file(**GEMMAS[name]), tmp_path)
    assert error(reference(weights, model), ggml(weights, model)) < TOLERANCES["F16"]


def test_gemma_quantised(tmp_path):
    check(gemma_file("Q4_0"), tmp_path)


@pytest.mark.parametrize("name", [name for name in GEMMAS if name != "plain"])
def test_a_gemma_variant_that_is_ignored_would_be_seen(tmp_path, name):
    (tmp_path / "plain").mkdir()
    plain = reference(*opened(gemma_file(), tmp_path / "plain"))
    varied = reference(*opened(gemma_file(**GEMMAS[name]), tmp_path))
    assert error(plain, varied) > 2 * TOLERANCES["F16"]


@pytest.mark.parametrize("attention", ["rows", "fast"])
def test_the_other_ways_to_attend(tmp_path, attention):
    check(decoder_file("llama"), tmp_path, attention=attention)


def test_a_quantised_cache(tmp_path):
    """Keys and values rounded to 8 bits: as good as quantised weights."""
    weights, model = opened(decoder_file("llama"), tmp_path)
    true, found = reference(weights, model), ggml(weights, model, cache="Q8_0")
    assert 1e-6 < error(true, found) < TOLERANCE_QUANTISED


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "tied"])
def test_a_variant_that_is_ignored_would_be_seen(tmp_path, name):
    """The variant's answers differ from the plain model's by more than any tolerance."""
    (tmp_path / "plain").mkdir()
    plain = reference(*opened(decoder_file("llama"), tmp_path / "plain"))
    varied = reference(*opened(decoder_file("llama", **VARIANTS[name]), tmp_path))
    assert error(plain, varied) > 2 * TOLERANCE_QUANTISED


def test_a_changed_weight_would_be_seen(tmp_path):
    (tmp_path / "plain").mkdir()
    file = decoder_file("llama", "Q4_0")
    plain = reference(*opened(file, tmp_path / "plain"))
    values, kind = file.tensors["blk.0.attn_v.weight"]
    file.tensors["blk.0.attn_v.weight"] = np.roll(values, 1, axis=0), kind
    changed = ggml(*opened(file, tmp_path))
    assert error(plain, changed) > 2 * TOLERANCE_QUANTISED
