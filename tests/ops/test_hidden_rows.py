"""Goal: a pass shows the hidden rows of chosen points without changing any other bit of it.

Method: tiny models of three families.  ggml's rows against the reference's, and those against what
follows from them: the head times the final rows are the logits.  Logits with and without are the
same bytes, for prompts cut anywhere, in company, over several passes.
"""

import numpy as np
import pytest

pytest.importorskip("gguf")
pytest.importorskip("ggml")

from hybrid_files import hybrid_file
from synthetic import VOCABULARY, WIDTH, decoder_file, gemma_file

from phaseloop.model.load import load_model
from phaseloop.model.weights import open_weights
from phaseloop.ops.ggml import GgmlBackend
from phaseloop.ops.interface import FINAL, HiddenBackend, Span
from phaseloop.ops.reference import ReferenceBackend, unpack

MODELS = {
    "llama": lambda kind: decoder_file("llama", kind),
    "gemma3": gemma_file,
    "qwen35": hybrid_file,
}
TOKENS = np.random.default_rng(9).integers(0, VOCABULARY, 140).tolist()
TAPS = (1, FINAL, 0)


@pytest.fixture(params=MODELS)
def loaded(request, tmp_path):
    weights = open_weights(MODELS[request.param]("F32").write(tmp_path / "model.gguf"))
    return weights, load_model(weights)


def backends(loaded, taps=TAPS, **options):
    weights, model = loaded
    parts = model.network, weights.tensors, model.dimensions
    sizes = {"region_count": 2, "capacity": 256}
    return (
        GgmlBackend(*parts, threads=1, taps=taps, **sizes, **options),
        ReferenceBackend(*parts, taps=taps, **sizes),
    )


def spans():
    return [Span(1, 0, TOKENS[:50], 2, False), Span(0, 0, TOKENS[50:], 0, False)]


def error(true, found):
    return float(((true - found) ** 2).sum() / (true**2).sum())


def test_both_backends_show_the_same_rows(loaded):
    ggml, reference = backends(loaded)
    assert isinstance(ggml, HiddenBackend) and isinstance(reference, HiddenBackend)
    found, true = ggml.forward_hidden(spans()), reference.forward_hidden(spans())
    assert found[1].shape == true[1].shape == (140, 3 * WIDTH)
    for rows, other in zip(found, true, strict=True):
        assert error(other, rows) < 1e-5


def test_points_are_what_they_say(loaded):
    """The embedding goes into the first layer; the head makes logits of the final rows."""
    weights, model = loaded
    reference = backends(loaded)[1]
    logits, hidden = reference.forward_hidden(spans())
    second, final, first = np.split(hidden, 3, axis=1)
    embedded = unpack(weights.tensors["token_embd.weight"])[TOKENS]
    embedded = embedded * getattr(model.network, "embedding_scale", 1.0)
    np.testing.assert_allclose(first, embedded, rtol=1e-6)
    head = unpack(weights.tensors[model.network.head])
    np.testing.assert_allclose(logits, final[48:50] @ head.T, rtol=1e-4, atol=1e-4)
    assert error(first, second) > 1e-3


@pytest.mark.parametrize("ubatch", [512, 32])
@pytest.mark.parametrize("kind", ["F32", "Q4_0", "Q4_K"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_keep_their_bits(tmp_path, name, kind, ubatch):
    weights = open_weights(MODELS[name](kind).write(tmp_path / "model.gguf"))
    loaded = weights, load_model(weights)
    plain, shown = backends(loaded, ubatch=ubatch)[0], backends(loaded, ubatch=ubatch)[0]
    answers = [Span(0, 90, [3, 4], 2, True), Span(1, 50, [5], 1, True)]
    for lanes in (spans(), answers):
        assert shown.forward_hidden(lanes)[0].tobytes() == plain.forward(lanes).tobytes()


def test_rows_do_not_depend_on_cuts_and_company(loaded):
    whole = backends(loaded)[0].forward_hidden(spans())[1]
    other = backends(loaded, ubatch=32)[0]
    parts = [
        other.forward_hidden([Span(0, start, TOKENS[50 + start : 50 + start + 45], 0, False)])[1]
        for start in (0, 45)
    ]
    assert np.concatenate(parts).tobytes() == whole[50:].tobytes()
