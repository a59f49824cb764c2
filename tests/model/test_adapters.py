"""Goal: a model with an adapter computes what the model would with the adapter folded into it.

Method: tiny random models and adapters of every kind of matrix that can have one; ggml against the
float64 reference with the adapter beside the matrices, and that against the reference over weights
into which it was folded.  The measure is the squared error relative to the squared logits, as in
test_against_reference.py; leaving the adapter away moves it to 0.01 and more.
"""

import numpy as np
import pytest

pytest.importorskip("gguf")
pytest.importorskip("ggml")

from adapter_files import EMBEDDING, AdapterFile
from hybrid_files import hybrid_file
from synthetic import VOCABULARY, decoder_file, gemma_file

from phaseloop.model.adapter import open_adapter
from phaseloop.model.load import load_model
from phaseloop.model.weights import open_weights
from phaseloop.ops.ggml import GgmlBackend
from phaseloop.ops.interface import BackendError, Span
from phaseloop.ops.reference import ReferenceBackend

EXACT = 1e-9  # two sums of doubles in another order, over factors rounded to F32
TOLERANCE, TOLERANCE_QUANTISED = 1e-5, 4e-3
SEEN = 1e-2  # that an adapter at least moves the logits
TOKENS = np.random.default_rng(3).integers(0, VOCABULARY, 90).tolist()
ON = ((0, 1.0),)


def opened(file, folder, name="model.gguf"):
    weights = open_weights(file.write(folder / name))
    return weights, load_model(weights)


def with_adapters(file, adapters, folder):
    weights, model = opened(file, folder)
    paths = [one.write(folder / f"adapter{at}.gguf") for at, one in enumerate(adapters)]
    return weights, model, [open_adapter(path, weights, model).adapter for path in paths]


def logits_of(backend, active=ON):
    """Of two prompts that share a pass, and of one generated token each."""
    prompts = [
        Span(0, 0, TOKENS[:30], 3, False, adapters=active),
        Span(1, 0, TOKENS[30:], 1, False, adapters=active),
    ]
    answers = [
        Span(0, 30, [7], 1, True, adapters=active),
        Span(1, 60, [9], 1, True, adapters=active),
    ]
    found = np.concatenate([backend.forward(prompts), backend.forward(answers)])
    backend.close()
    return found


def reference(weights, model, adapters=(), active=ON):
    dimensions = model.dimensions
    backend = ReferenceBackend(
        model.network, weights.tensors, dimensions, region_count=2, capacity=128, adapters=adapters
    )
    return logits_of(backend, active)


def ggml_backend(weights, model, adapters=(), **options):
    return GgmlBackend(
        model.network,
        weights.tensors,
        model.dimensions,
        region_count=2,
        capacity=128,
        threads=1,
        adapters=adapters,
        **options,
    )


def ggml(weights, model, adapters=(), active=ON, **options):
    return logits_of(ggml_backend(weights, model, adapters, **options), active)


def error(true, found):
    return float(((true - found) ** 2).sum() / (true**2).sum())


def matrices(file):
    """All that a network multiplies by: not the convolution of a delta net."""
    return [
        name
        for name, (values, _) in file.tensors.items()
        if values.ndim > 1 and name != EMBEDDING and "conv1d" not in name
    ]


FILES = {
    "llama": (lambda: decoder_file("llama"), 1e-5),
    "biases": (lambda: decoder_file("qwen2", biases=True), 1e-5),
    "mixture": (lambda: decoder_file("qwen3moe", head_norms=True, experts=True), 1e-5),
    "windows": (gemma_file, 1e-4),
    "hybrid": (hybrid_file, 1e-5),
    "fused": (lambda: hybrid_file(mixture=True, fused=True), 1e-5),
}


@pytest.mark.parametrize("name", FILES)
def test_every_matrix_of_every_family(tmp_path, name):
    make, tolerance = FILES[name]
    file = make()
    adapter = AdapterFile(file, matrices(file), rank=3)
    weights, model, adapters = with_adapters(file, [adapter], tmp_path)
    beside = reference(weights, model, adapters)
    merged = reference(*opened(adapter.folded(), tmp_path, "folded.gguf"), active=())
    assert error(merged, beside) < EXACT
    assert error(beside, ggml(weights, model, adapters)) < tolerance
    assert error(beside, reference(weights, model, active=())) > SEEN


ONE_BY_ONE = {
    "llama": decoder_file("llama"),
    "mixture": decoder_file("qwen3moe", head_norms=True, experts=True),
    "hybrid": hybrid_file(mixture=True),
}


@pytest.mark.parametrize(
    ("family", "matrix"),
    [
        (family, name)
        for family, file in ONE_BY_ONE.items()
        for name in [*matrices(file), EMBEDDING]
        if name.startswith(("blk.1.", "blk.3.", "output", "token"))
    ],
)
def test_each_matrix_by_itself(tmp_path, family, matrix):
    """So none is forgotten behind the effect of the others."""
    file = ONE_BY_ONE[family]
    adapter = AdapterFile(file, [matrix], alpha=16.0)
    weights, model, adapters = with_adapters(file, [adapter], tmp_path)
    merged = reference(*opened(adapter.folded(), tmp_path, "folded.gguf"), active=())
    plain = reference(weights, model, active=())
    assert error(merged, reference(weights, model, adapters)) < EXACT
    assert error(merged, ggml(weights, model, adapters)) < TOLERANCE < error(merged, plain)


def test_the_expert_that_serves_all(tmp_path):
    """Its router is a vector in the file, and a matrix of one row to an adapter."""
    file = hybrid_file(mixture=True)
    adapter = AdapterFile(file, ["blk.0.ffn_gate_inp_shexp.weight"], alpha=64.0)
    weights, model, adapters = with_adapters(file, [adapter], tmp_path)
    merged = reference(*opened(adapter.folded(), tmp_path, "folded.gguf"), active=())
    assert error(merged, ggml(weights, model, adapters)) < TOLERANCE
    assert error(merged, reference(weights, model, active=())) > 10 * TOLERANCE


def test_an_embedding_that_is_the_head_changes_only_as_an_embedding(tmp_path):
    file = decoder_file("llama", tied=True)
    adapter = AdapterFile(file, [EMBEDDING], alpha=16.0)
    weights, model, adapters = with_adapters(file, [adapter], tmp_path)
    apart = adapter.folded()
    apart.tensors["output.weight"] = file.tensors[EMBEDDING]
    merged = reference(*opened(apart, tmp_path, "folded.gguf"), active=())
    assert error(merged, reference(weights, model, adapters)) < EXACT
    assert error(merged, ggml(weights, model, adapters)) < TOLERANCE


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0"])
def test_factors_of_other_types(tmp_path, kind):
    file = decoder_file("llama")
    adapter = AdapterFile(file, matrices(file), rank=256, alpha=256.0, kind=kind)
    weights, model, adapters = with_adapters(file, [adapter], tmp_path)
    beside = reference(weights, model, adapters)
    assert error(beside, ggml(weights, model, adapters)) < TOLERANCE_QUANTISED
    assert error(beside, reference(weights, model, active=())) > SEEN


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K"])
def test_a_base_that_is_repacked(tmp_path, kind):
    file = decoder_file("llama", kind)
    adapter = AdapterFile(file, matrices(file))
    weights, model, adapters = with_adapters(file, [adapter], tmp_path)
    beside = reference(weights, model, adapters)
    assert error(beside, ggml(weights, model, adapters)) < TOLERANCE_QUANTISED


def test_several_at_their_scales(tmp_path):
    """What each adds is its scale's share, also of a negative one; the order is of no account."""
    file = decoder_file("llama")
    one = AdapterFile(file, ["blk.0.attn_q.weight", "blk.1.ffn_up.weight"], rank=2, seed=1)
    two = AdapterFile(file, ["blk.0.attn_q.weight"], rank=8, alpha=4.0, seed=2)
    active = ((0, 0.5), (1, -1.5))
    weights, model, adapters = with_adapters(file, [one, two], tmp_path)
    two.base = one.folded(0.5)
    merged = reference(*opened(two.folded(-1.5), tmp_path, "folded.gguf"), active=())
    assert error(merged, reference(weights, model, adapters, active)) < EXACT
    assert error(merged, ggml(weights, model, adapters, active)) < TOLERANCE


def test_without_an_alpha_nothing_is_divided_by_the_rank(tmp_path):
    file = decoder_file("llama")
    adapter = AdapterFile(file, ["blk.0.attn_v.weight"], alpha=0.0)
    weights, model, adapters = with_adapters(file, [adapter], tmp_path)
    (part,) = adapters[0].matrices.values()
    assert part.factor == 1.0
    adapter.alpha = 4.0  # by rank 4
    merged = reference(*opened(adapter.folded(), tmp_path, "folded.gguf"), active=())
    assert error(merged, reference(weights, model, adapters)) < EXACT


def test_adapters_that_nobody_uses_change_no_bit(tmp_path):
    file = decoder_file("llama", "Q4_0")
    weights, model, adapters = with_adapters(file, [AdapterFile(file, matrices(file))], tmp_path)
    plain = ggml(weights, model, active=())
    assert ggml(weights, model, adapters, active=()).tobytes() == plain.tobytes()
    assert ggml(weights, model, adapters).tobytes() != plain.tobytes()


def test_graphs_of_one_shape_and_other_adapters_are_others(tmp_path):
    """Generated tokens take graphs again: never one that was built for another list."""
    file = decoder_file("llama")
    adapter = AdapterFile(file, matrices(file))
    backend = ggml_backend(*with_adapters(file, [adapter], tmp_path))
    backend.forward([Span(0, 0, TOKENS[:30], 1, False)])

    def generated(active):
        backend.truncate(0, 30)
        return backend.forward([Span(0, 30, [7], 1, True, adapters=active)]).tobytes()

    lists = [(), ON, ((0, 0.5),)]
    first = [generated(active) for active in lists]
    assert len(set(first)) == 3
    assert [generated(active) for active in reversed(lists)] == first[::-1]
    backend.close()


REFUSED = {
    "beyond those loaded": ((2, 1.0),),
    "before them": ((-1, 1.0),),
    "twice": ((0, 1.0), (0, 1.0)),
    "out of order": ((1, 1.0), (0, 1.0)),
}


@pytest.mark.parametrize("active", REFUSED.values(), ids=REFUSED)
def test_a_list_of_adapters_that_are_not_there_is_refused(tmp_path, active):
    file = decoder_file("llama")
    adapter = AdapterFile(file, ["blk.0.attn_q.weight"])
    weights, model, adapters = with_adapters(file, [adapter, adapter], tmp_path)
    assert logits_of(ggml_backend(weights, model, adapters), ((0, 1.0), (1, 1.0))).size
    for make in (ggml, reference):
        with pytest.raises(BackendError, match="of 2 that are loaded"):
            make(weights, model, adapters, active)


def test_two_lists_in_one_pass_are_refused(tmp_path):
    file = decoder_file("llama")
    adapter = AdapterFile(file, ["blk.0.attn_q.weight"])
    backend = ggml_backend(*with_adapters(file, [adapter], tmp_path))
    spans = [Span(0, 0, TOKENS[:3], 1, False, adapters=ON), Span(1, 0, TOKENS[:3], 1, False)]
    with pytest.raises(BackendError, match="different adapters"):
        backend.forward(spans)
    backend.close()
