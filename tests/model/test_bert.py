"""Goal: encoders give the rows that their formulas say, whatever else is computed beside them.

Method: tiny random models.  The float64 reference is compared with a forward pass that is written
here, from the papers' formulas and with nothing of ours; ggml is compared with the reference, in
the measure of test_against_reference.py.  Bits are compared with bits: alone and in company.
"""

import math

import numpy as np
import pytest

pytest.importorskip("gguf")
pytest.importorskip("ggml")

from encoder_files import HEADS, LAYERS, POSITIONS, VOCABULARY, encoder_file
from gguf_mutations import mutated
from gguf_parts import taken_apart
from synthetic import decoder_file

from phaseloop.model.embedding import encoder_of
from phaseloop.model.gguf_file import ModelError
from phaseloop.model.load import load_model
from phaseloop.model.weights import open_weights
from phaseloop.ops.ggml import GgmlBackend
from phaseloop.ops.interface import Span
from phaseloop.ops.reference import ReferenceBackend, unpack

# ggml rounds keys and values to F16, activations as the weights' type has it.
TOLERANCES = {"F32": 1e-6, "F16": 1e-5, "Q8_0": 1e-4, "Q4_0": 4e-3}
LENGTHS = (30, 1, 64, 100, 7)


def opened(file, path, pooling="none"):
    weights = open_weights(file.write(path / f"{file.architecture}-{file.kind}.gguf"))
    model, _ = encoder_of(load_model(weights), weights, pooling)
    return weights, model


def prompts(lengths=LENGTHS):
    random = np.random.default_rng(3)
    return [
        Span(region, 0, random.integers(0, VOCABULARY, length).tolist(), length, False)
        for region, length in enumerate(lengths)
    ]


def reference(weights, model, spans):
    return ReferenceBackend(
        model.network, weights.tensors, model.dimensions, region_count=8, capacity=POSITIONS
    ).forward(spans)


def ggml(weights, model, spans, **options):
    backend = GgmlBackend(
        model.network,
        weights.tensors,
        model.dimensions,
        region_count=8,
        capacity=POSITIONS,
        threads=options.pop("threads", 1),
        **options,
    )
    rows = backend.forward(spans)
    backend.close()
    return rows


def error(true, found):
    return float(((true - found) ** 2).sum() / (true**2).sum())


# --- the formulas, once more ----------------------------------------------------------------------


def forward_by_hand(weights, tokens):
    """BERT of Devlin et al., or NomicBERT: [T] token ids -> [T, D]."""
    w = {name: unpack(weight) for name, weight in weights.tensors.items()}
    is_bert = "position_embd.weight" in w

    def normed(x, name):
        x = x - x.mean(1, keepdims=True)
        x = x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-6)
        return x * w[f"{name}.weight"] + w[f"{name}.bias"]

    def product(x, name):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    x = w["token_embd.weight"][tokens]
    if "token_types.weight" in w:
        x = x + w["token_types.weight"][0]
    if is_bert:
        x = x + w["position_embd.weight"][: len(tokens)]
    x = normed(x, "token_embd_norm")
    for index in range(LAYERS):
        block = f"blk.{index}."
        if f"{block}attn_qkv.weight" in w:
            q, k, v = np.split(product(x, f"{block}attn_qkv"), 3, axis=1)
        else:
            q, k, v = (product(x, f"{block}attn_{part}") for part in "qkv")
        mixed = np.concatenate(
            [
                one_head(*parts, turned=not is_bert)
                for parts in zip(
                    *(np.split(part, HEADS, axis=1) for part in (q, k, v)), strict=True
                )
            ],
            axis=1,
        )
        x = normed(x + product(mixed, f"{block}attn_output"), f"{block}attn_output_norm")
        hidden = product(x, f"{block}ffn_up")
        if is_bert:
            hidden = np.array(
                [[g / 2 * (1 + math.erf(g / math.sqrt(2))) for g in row] for row in hidden]
            )
        else:
            gate = product(x, f"{block}ffn_gate")
            hidden = hidden * gate / (1 + np.exp(-gate))
        x = normed(x + product(hidden, f"{block}ffn_down"), f"{block}layer_output_norm")
    return x


def one_head(q, k, v, *, turned):
    if turned:
        q, k = (rotated(part) for part in (q, k))
    shares = np.exp(q @ k.T / math.sqrt(q.shape[1]))
    return shares / shares.sum(1, keepdims=True) @ v


def rotated(x):
    half = x.shape[1] // 2
    angle = np.outer(np.arange(len(x)), 10_000.0 ** (-np.arange(half) / half))
    a, b = x[:, :half], x[:, half:]
    return np.hstack([a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)])


VARIANTS = {
    "bert": {},
    "fused": {"fused": True},
    "no_types": {"types": False},
    "no_biases": {"biases": False},
    "nomic": {"architecture": "nomic-bert", "biases": False, "fused": True},
    "nomic_apart": {"architecture": "nomic-bert"},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_reference_computes_the_formulas(tmp_path, name):
    weights, model = opened(encoder_file(**VARIANTS[name]), tmp_path)
    spans = prompts()
    by_hand = np.concatenate([forward_by_hand(weights, span.tokens) for span in spans])
    assert error(by_hand, reference(weights, model, spans)) < 1e-13


@pytest.mark.parametrize("name", VARIANTS)
def test_ggml_computes_the_formulas(tmp_path, name):
    weights, model = opened(encoder_file(**VARIANTS[name]), tmp_path)
    assert error(reference(weights, model, prompts()), ggml(weights, model, prompts())) < 1e-6


@pytest.mark.parametrize("kind", TOLERANCES)
def test_every_kind_of_weights(tmp_path, kind):
    weights, model = opened(encoder_file(kind=kind, width=256), tmp_path)
    true, found = (way(weights, model, prompts()) for way in (reference, ggml))
    assert error(true, found) < TOLERANCES[kind]


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "bert"])
def test_a_variant_that_is_ignored_would_be_seen(tmp_path, name):
    plain = reference(*opened(encoder_file(), tmp_path), prompts())
    varied = reference(*opened(encoder_file(**VARIANTS[name]), tmp_path), prompts())
    assert error(plain, varied) > 1e-2


@pytest.mark.parametrize("way", [reference, ggml])
def test_rows_see_those_after_them(tmp_path, way):
    weights, model = opened(encoder_file(), tmp_path)
    (span,) = prompts((20,))
    other = Span(0, 0, [*span.tokens[:-1], (span.tokens[-1] + 1) % VOCABULARY], 20, False)
    before, after = way(weights, model, [span]), way(weights, model, [other])
    assert error(before[:1], after[:1]) > 1e-4


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_0"])
def test_bits_do_not_depend_on_company(tmp_path, kind):
    weights, model = opened(encoder_file(kind=kind, width=256), tmp_path)
    spans = prompts()
    together = ggml(weights, model, spans)
    alone = np.concatenate([ggml(weights, model, [span]) for span in spans])
    assert together.tobytes() == alone.tobytes()
    assert ggml(weights, model, spans, ubatch=32).tobytes() == together.tobytes()
    assert ggml(weights, model, spans, threads=2).tobytes() == together.tobytes()
    elsewhere = [Span(7 - s.region, 0, s.tokens, s.outputs, False) for s in spans]
    assert ggml(weights, model, elsewhere).tobytes() == together.tobytes()


@pytest.mark.parametrize("attention", ["rows", "fast"])
def test_the_other_ways_to_attend(tmp_path, attention):
    weights, model = opened(encoder_file(), tmp_path)
    found = ggml(weights, model, prompts(), attention=attention)
    assert error(reference(weights, model, prompts()), found) < 1e-6


# --- classifiers, decoders ------------------------------------------------------------------------


@pytest.mark.parametrize("dense", [True, False])
def test_a_classifier_makes_scores_of_rows(tmp_path, dense):
    file = encoder_file(labels=3, dense=dense)
    weights, model = opened(file, tmp_path, "rank")
    w = {name: unpack(weight) for name, weight in weights.tensors.items()}
    (span,) = prompts((9,))
    rows = forward_by_hand(weights, span.tokens)
    if dense:
        rows = np.tanh(rows @ w["cls.weight"].T + w["cls.bias"])
    scores = rows @ w["cls.output.weight"].T + w["cls.output.bias"]
    assert error(scores, reference(weights, model, [span])) < 1e-12
    assert error(scores, ggml(weights, model, [span])) < 1e-5


def test_a_decoder_gives_the_rows_that_its_head_reads(tmp_path):
    weights = open_weights(decoder_file("llama").write(tmp_path / "llama.gguf"))
    model = load_model(weights)
    rows, pooling = encoder_of(model, weights, None)
    assert pooling == "none"
    span = Span(0, 0, [5, 7, 11, 13], 4, False)
    found = reference(weights, rows, [span])
    logits = reference(weights, model, [span])
    head = unpack(weights.tensors["output.weight"])
    assert found.shape == (4, 256)
    assert error(logits, found @ head.T) < 1e-12


# --- files that are wrong -------------------------------------------------------------------------

OPTIONAL = ("token_types.weight", "cls.weight", "cls.bias", "cls.output.bias")


def names_of(file):
    return [
        name
        for name in file.tensors
        if not name.startswith("blk.1.") and name not in OPTIONAL and not name.endswith("v.bias")
    ]


@pytest.mark.parametrize("name", names_of(encoder_file(labels=2)))
def test_each_tensor_is_missed_or_its_shape_refused(tmp_path, name):
    file = encoder_file(labels=2)
    values, kind = file.tensors.pop(name)
    is_bias = name.endswith(".bias") and "norm" not in name
    path = file.write(tmp_path / "model.gguf")
    if not is_bias and not name.startswith("cls"):
        with pytest.raises(ModelError, match=f"tensor {name} is missing"):
            load_model(open_weights(path))
    file.tensors[name] = values[..., : values.shape[-1] // 2], kind
    with pytest.raises(ModelError, match=f"tensor {name} has shape"):
        load_model(open_weights(file.write(path)))


KEYS = {
    "context_length": (0, "context_length is 0"),
    "embedding_length": (65, "has shape"),
    "block_count": (3, "tensor blk.2.attn_output_norm.weight is missing"),
    "attention.head_count": (0, "head_count is 0"),
    "attention.layer_norm_epsilon": (2.0, "layer_norm_epsilon is 2.0"),
    "pooling_type": (5, "pooling_type is 5, possible are 0 to 4"),
}


@pytest.mark.parametrize("key", KEYS)
def test_each_key_is_refused_by_name(tmp_path, key):
    value, problem = KEYS[key]
    file = encoder_file()
    file.metadata[key] = value
    with pytest.raises(ModelError, match=problem):
        load_model(open_weights(file.write(tmp_path / "model.gguf")))


@pytest.mark.parametrize(
    ("value", "problem"),
    [("two", "token_type_count is 'two', not an integer"), (3, "token_types.weight has shape")],
)
def test_the_number_of_token_types_is_checked(tmp_path, value, problem):
    file = encoder_file()
    file.root["tokenizer.ggml.token_type_count"] = value
    with pytest.raises(ModelError, match=problem):
        load_model(open_weights(file.write(tmp_path / "model.gguf")))


def test_labels_are_a_list(tmp_path):
    file = encoder_file(labels=2)
    file.root["bert.classifier.output_labels"] = 2
    with pytest.raises(ModelError, match=r"classifier\.output_labels is no list"):
        load_model(open_weights(file.write(tmp_path / "model.gguf")))


def test_ranking_without_a_classifier_is_refused(tmp_path):
    with pytest.raises(ModelError, match="there is no classifier"):
        opened(encoder_file(), tmp_path, "rank")


@pytest.mark.parametrize("architecture", ["bert", "nomic-bert"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of values that are no numbers
def test_a_file_with_anything_wrong_is_refused_or_computes(tmp_path, architecture):
    path = encoder_file(architecture, labels=2).write(tmp_path / "sound.gguf")
    sound, wrong = taken_apart(path), tmp_path / "wrong.gguf"
    (span,) = prompts((3,))
    refused = 0
    for seed in range(60):
        wrong.write_bytes(mutated(sound, seed))
        try:
            weights = open_weights(wrong)
            weights.check_values()
            model, _ = encoder_of(load_model(weights), weights, "rank")
        except ModelError:
            refused += 1
            continue
        if model.context_length >= POSITIONS:
            tokens = [token % model.dimensions.vocabulary for token in span.tokens]
            ggml(weights, model, [Span(0, 0, tokens, 3, False)])
    assert 30 < refused < 60
