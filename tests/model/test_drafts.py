"""Goal: networks that draft from hidden rows compute what they should; misfits are refused.

Method: tiny random files.  ggml against the float64 reference, and a formula of its own for
what a block makes of a token and a row; files of blocks with one thing spoilt.
"""

import numpy as np
import pytest

pytest.importorskip("gguf")
pytest.importorskip("ggml")

from hybrid_files import hybrid_file
from synthetic import VOCABULARY, WIDTH

from phaseloop.model.drafts import draft_from, own_draft
from phaseloop.model.gguf_file import ModelError
from phaseloop.model.load import load_model
from phaseloop.model.weights import open_weights
from phaseloop.ops.ggml import GgmlBackend
from phaseloop.ops.interface import BackendError, Span
from phaseloop.ops.reference import ReferenceBackend

RANDOM = np.random.default_rng(8)
TOKENS = RANDOM.integers(0, VOCABULARY, 40).tolist()
ROWS = RANDOM.standard_normal((40, WIDTH)).astype(np.float32)


def opened(file, path, name="model.gguf"):
    return open_weights(file.write(path / name))


def block_file(**options):
    """The block alone."""
    file = hybrid_file(draft=True, **options)
    for name in list(file.tensors):
        if name.startswith("blk.") and not name.startswith("blk.4."):
            del file.tensors[name]
    return file


def backends(draft):
    parts = draft.network, draft.tensors, draft.dimensions
    sizes = {"region_count": 1, "capacity": 128, "taps": draft.taps}
    ggml = GgmlBackend(*parts, threads=1, attention="fast", repack=False, **sizes)
    return ggml, ReferenceBackend(*parts, **sizes)


def error(true, found):
    return float(((true - found) ** 2).sum() / (true**2).sum())


@pytest.mark.parametrize("kind, tolerance", [("F32", 1e-5), ("Q8_0", 1e-2), ("Q4_K", 3e-2)])
@pytest.mark.parametrize("mixture", [False, True])
def test_both_backends_draft_the_same(tmp_path, kind, tolerance, mixture):
    weights = opened(hybrid_file(kind, draft=True, mixture=mixture, fused=mixture), tmp_path)
    load_model(weights)
    found = []
    for backend in backends(own_draft(weights)):
        read = backend.forward_hidden([Span(0, 0, TOKENS[:30], 2, False, given=ROWS[:30])])
        more = backend.forward_hidden([Span(0, 30, TOKENS[30:], 3, True, given=ROWS[30:])])
        found.append([np.concatenate(rows) for rows in zip(read, more, strict=True)])
    (logits, hidden), (true_logits, true_hidden) = found
    assert logits.shape == (5, VOCABULARY) and hidden.shape == (40, WIDTH)
    assert error(true_logits, logits) < tolerance and error(true_hidden, hidden) < tolerance


def test_token_and_row_go_in_normed_and_side_by_side(tmp_path):
    """With layers that add nothing: logits = head . norm(eh_proj . [norm(token), norm(row)])."""
    file = hybrid_file(draft=True)
    for part in ("attn_output", "ffn_down"):
        name = f"blk.4.{part}.weight"
        file.tensors[name] = 0 * file.tensors[name][0], "F32"

    def normed(x, name):
        scale = np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6)
        return x / scale * file.tensors[name][0]

    token = normed(file.tensors["token_embd.weight"][0][TOKENS], "blk.4.nextn.enorm.weight")
    row = normed(ROWS.astype(np.float64), "blk.4.nextn.hnorm.weight")
    joint = np.concatenate((token, row), axis=1) @ file.tensors["blk.4.nextn.eh_proj.weight"][0].T
    hidden = normed(joint, "blk.4.nextn.shared_head_norm.weight")
    expected = hidden @ file.tensors["output.weight"][0].T
    for backend in backends(own_draft(opened(file, tmp_path))):
        span = Span(0, 0, TOKENS, len(TOKENS), False, given=ROWS)
        logits, shown = backend.forward_hidden([span])
        assert error(expected, logits) < 1e-8 and error(hidden, shown) < 1e-8


def test_own_tables_are_used_where_the_block_has_some(tmp_path):
    """Other embeddings, other heads; without a norm of its own, the model's."""
    found = []
    for name in (None, "embed_tokens", "shared_head_head", "shared_head_norm"):
        file = hybrid_file(draft=True)
        if name == "shared_head_norm":
            del file.tensors["blk.4.nextn.shared_head_norm.weight"]
        elif name is not None:
            file.matrix(f"blk.4.nextn.{name}.weight", VOCABULARY, WIDTH)
        backend = backends(own_draft(opened(file, tmp_path)))[1]
        span = Span(0, 0, TOKENS, 1, False, given=ROWS)
        found.append(backend.forward([span])[0])
    for other in found[1:]:
        assert error(found[0], other) > 1e-2


def test_a_block_of_its_own_file_drafts_as_the_same_one_beside_its_model(tmp_path):
    target = opened(hybrid_file(draft=True), tmp_path)
    block = draft_from(opened(block_file(), tmp_path, "block.gguf"), target)
    span = Span(0, 0, TOKENS, 1, False, given=ROWS)
    found = [backends(draft)[0].forward([span]).tobytes() for draft in (own_draft(target), block)]
    assert found[0] == found[1]


def test_models_without_a_block_have_none(tmp_path):
    weights = opened(hybrid_file(), tmp_path)
    assert own_draft(weights) is None and draft_from(weights, weights) is None


def test_rows_must_come_along_and_fit(tmp_path):
    backend = backends(own_draft(opened(hybrid_file(draft=True), tmp_path)))[0]
    with pytest.raises(BackendError, match="the network reads rows of 256"):
        backend.forward([Span(0, 0, TOKENS, 1, False, given=ROWS[:, 1:])])


# --- what is refused ------------------------------------------------------------------------------


def refusal(file, path):
    target = opened(hybrid_file(), path, "target.gguf")
    with pytest.raises(ModelError) as caught:
        draft_from(opened(file, path), target)
    return str(caught.value)


def test_another_vocabulary_is_refused(tmp_path):
    said = refusal(block_file(vocabulary=VOCABULARY + 32), tmp_path)
    assert "a model of other tokens (192, not 160)" in said and "model.gguf" in said


def test_every_tensor_of_the_block_is_needed_in_its_shape(tmp_path):
    names = [name for name in block_file().tensors if name.startswith("blk.")]
    for name in names:
        if "shared_head_norm" in name:
            continue
        file = block_file()
        del file.tensors[name]
        assert f"tensor {name} is missing" in refusal(file, tmp_path)
        file = block_file()
        values, kind = file.tensors[name]
        file.tensors[name] = values[:-32], kind
        assert f"tensor {name} has shape" in refusal(file, tmp_path)


def test_a_tensor_of_the_trunk_is_one_too_many(tmp_path):
    file = block_file()
    file.vector("blk.1.attn_norm.weight", WIDTH)
    assert "tensor blk.1.attn_norm.weight is unknown" in refusal(file, tmp_path)
