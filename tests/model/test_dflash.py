"""Goal: DFlash drafters compute what their formulas say, and files that do not fit are refused.

Method: tiny random files.  ggml against the float64 reference; that a block sees all of itself and
the rows that were read, in windows where there are some, is shown by changing one and looking at
another.  Files with one key or tensor spoilt are refused by its name.
"""

import numpy as np
import pytest

pytest.importorskip("gguf")
pytest.importorskip("ggml")

from dflash_files import MASK, dflash_file, with_token_ids
from hybrid_files import hybrid_file
from synthetic import VOCABULARY, WIDTH, decoder_file

from phaseloop.model.drafts import draft_from
from phaseloop.model.gguf_file import ModelError
from phaseloop.model.weights import open_weights
from phaseloop.ops.ggml import GgmlBackend
from phaseloop.ops.interface import Span
from phaseloop.ops.reference import ReferenceBackend

RANDOM = np.random.default_rng(12)
TOKENS = RANDOM.integers(0, VOCABULARY, 30).tolist()
ROWS = RANDOM.standard_normal((30, 2 * WIDTH)).astype(np.float32)
BLOCK = (7, MASK, MASK, MASK)
SECTIONS = "rope.dimension_sections"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return open_weights(hybrid_file().write(tmp_path_factory.mktemp("target") / "target.gguf"))


def opened(file, target, path):
    return draft_from(open_weights(file.write(path / "model.gguf")), target)


def backends(draft):
    parts = draft.network, draft.tensors, draft.dimensions
    sizes = {"region_count": 2, "capacity": 128, "taps": draft.taps}
    ggml = GgmlBackend(*parts, threads=1, attention="fast", repack=False, **sizes)
    return ggml, ReferenceBackend(*parts, **sizes)


def filled(backend, rows=ROWS, block=BLOCK):
    """Logits at the masks of two blocks; the second one's text is shorter."""
    read = [Span(lane, 0, TOKENS[: 30 - lane], 0, False, given=rows[lane:]) for lane in (0, 1)]
    backend.forward(read)
    blocks = [Span(lane, 30 - lane, block, len(block) - 1, True) for lane in (0, 1)]
    return backend.forward(blocks)


def error(true, found):
    return float(((true - found) ** 2).sum() / (true**2).sum())


VARIANTS = {
    "plain": {},
    "ends": {"ends": True},
    "causal": {"attention.causal": True},
    "scaled": {"embedding_scale": 3.0, "attention.value_scale": 0.5, "attention.scale": 0.2},
    "windows": {
        "attention.sliding_window": 9,
        "attention.sliding_window_pattern": [True, False],
    },
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("kind, tolerance", [("F32", 1e-5), ("Q8_0", 1e-2)])
def test_both_backends_draft_the_same(target, tmp_path, name, kind, tolerance):
    draft = opened(dflash_file(kind, **VARIANTS[name]), target, tmp_path)
    assert draft.taps == (3, 1) and draft.block_length == 6 and draft.mask == MASK
    ggml, reference = (filled(backend) for backend in backends(draft))
    assert ggml.shape == (6, VOCABULARY) and error(reference, ggml) < tolerance


def test_every_variant_is_another_network(target, tmp_path):
    found = [
        filled(backends(opened(dflash_file(**v), target, tmp_path))[1]) for v in VARIANTS.values()
    ]
    for other in found[1:]:
        assert error(found[0], other) > 1e-4


@pytest.mark.parametrize("causal", [False, True])
def test_a_mask_sees_the_masks_behind_it_unless_it_must_not(target, tmp_path, causal):
    draft = opened(dflash_file(**{"attention.causal": causal}), target, tmp_path)
    for backend in backends(draft):
        plain = filled(backend)[0]
        changed = filled(backend, block=(*BLOCK[:3], 99))[0]
        assert (error(plain, changed) < 1e-12) == causal


def test_a_window_hides_rows_of_long_ago(target, tmp_path):
    """In both layers: what came more than a window before the block shows in nothing."""
    metadata = VARIANTS["windows"] | {"attention.sliding_window_pattern": [True, True]}
    draft = opened(dflash_file(**metadata), target, tmp_path)
    for changed, is_seen in ((slice(0, 15), False), (slice(25, 30), True)):
        rows = ROWS.copy()
        rows[changed] += 1.0
        for backend in backends(draft):
            moved = error(filled(backend), filled(backend, rows=rows))
            assert (moved > 1e-6) == is_seen


def test_what_it_has_not_it_takes_from_its_target(target, tmp_path):
    plain = opened(dflash_file(), target, tmp_path)
    for name in ("token_embd.weight", "output.weight"):
        assert plain.tensors[name].data.tobytes() == target.tensors[name].data.tobytes()
    own = opened(dflash_file(ends=True), target, tmp_path)
    assert (
        own.tensors["output.weight"].data.tobytes()
        != target.tensors["output.weight"].data.tobytes()
    )


def test_it_may_know_fewer_tokens(target, tmp_path):
    ids = [5, 3, *range(20, 52)]
    (tmp_path / "few").mkdir()
    draft = opened(with_token_ids(dflash_file(ends=True), ids), target, tmp_path / "few")
    full = opened(dflash_file(ends=True), target, tmp_path)
    assert draft.token_ids == tuple(ids)
    for few, all_of_them in zip(backends(draft), backends(full), strict=True):
        np.testing.assert_allclose(filled(few), filled(all_of_them)[:, ids], rtol=1e-4, atol=1e-4)


# --- rotary sections ------------------------------------------------------------------------------


def text_only(path):
    file = decoder_file("qwen3", head_norms=True, layers=4)
    return open_weights(file.write(path / "text.gguf"))


def test_sections_are_those_stated_or_follow_the_first_axis(target, tmp_path):
    """A head of 64 has 32 pairs."""
    legacy, stated = dflash_file(), dflash_file(**{SECTIONS: [20, 6, 6, 0]})
    assert opened(legacy, target, tmp_path).sections == (32, 0, 0, 0)
    half = dflash_file(**{"rope.dimension_count": 32})
    assert opened(half, target, tmp_path).sections == (16, 0, 0, 0)
    assert opened(stated, target, tmp_path).sections == (20, 6, 6, 0)
    text = text_only(tmp_path)
    assert opened(legacy, text, tmp_path).sections is None
    assert opened(stated, text, tmp_path).sections == (20, 6, 6, 0)


# --- what is refused ------------------------------------------------------------------------------

KEYS = {
    "target_layers": ([], [4], [-1, 2], [1, 1], 3, [0.5, 1.5]),
    "block_size": (1, 1000, "6"),
    "rope.dimension_count": (0, 33, 66),
    SECTIONS: ([1, 2], [30, 3, 0, 0], [-1, 2, 0, 0]),
    "attention.value_length": (32,),
    "attention.causal": (1,),
}


def refusal(file, target, path):
    with pytest.raises(ModelError) as caught:
        opened(file, target, path)
    return str(caught.value)


@pytest.mark.parametrize("key, value", [(key, v) for key, vs in KEYS.items() for v in vs])
def test_a_wrong_key_is_named(target, tmp_path, key, value):
    file = dflash_file()
    file.metadata[key] = value
    assert f"dflash.{key}" in refusal(file, target, tmp_path)


def test_missing_keys_and_windows_without_a_pattern_are_named(target, tmp_path):
    file = dflash_file()
    del file.metadata["target_layers"]
    assert "key dflash.target_layers is missing" in refusal(file, target, tmp_path)
    file = dflash_file()
    del file.root["tokenizer.ggml.mask_token_id"]
    assert "mask_token_id is missing" in refusal(file, target, tmp_path)
    file = dflash_file(**{"attention.sliding_window": 9})
    assert "sliding_window_pattern" in refusal(file, target, tmp_path)


def test_every_tensor_is_needed_in_its_shape(target, tmp_path):
    for name in dflash_file().tensors:
        file = dflash_file()
        del file.tensors[name]
        assert f"tensor {name} is missing" in refusal(file, target, tmp_path)
        file = dflash_file()
        values, kind = file.tensors[name]
        file.tensors[name] = values[:-32], kind
        assert f"tensor {name} has shape" in refusal(file, target, tmp_path)


@pytest.mark.parametrize("name", ["selector_hidden.weight", "markov_w1.weight"])
def test_its_successors_are_refused_by_a_tensor_that_is_theirs(target, tmp_path, name):
    file = dflash_file()
    file.matrix(name, 8, VOCABULARY)
    assert f"tensor {name} is unknown to architecture dflash" in refusal(file, target, tmp_path)


def test_another_vocabulary_or_width_is_refused(target, tmp_path):
    file = dflash_file(ends=True)
    values, kind = file.tensors["token_embd.weight"]
    file.tensors["token_embd.weight"] = values[:128], kind
    assert "a model of other tokens" in refusal(file, target, tmp_path)
    file = dflash_file(embedding_length=128)
    assert "dflash.embedding_length is 128" in refusal(file, target, tmp_path)


@pytest.mark.parametrize("ids", [[1, 1, 2], [0, VOCABULARY], [-1, 4]])
def test_token_ids_that_make_no_sense_are_refused(target, tmp_path, ids):
    file = with_token_ids(dflash_file(ends=True), [1] * len(ids))
    file.tensors["d2t"] = np.array(ids, np.int64), "I64"
    assert "tensor d2t names a token twice" in refusal(file, target, tmp_path)
