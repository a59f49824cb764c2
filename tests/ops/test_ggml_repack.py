"""Goal: matrices are repacked only where that is safe, and then compute the same thing faster.

Method: what is stable is judged on made-up kernels whose habits are known; tiny models with and
without repacking must be equally near the reference; bits must break where a guard is removed.
Types that this CPU's ggml does not repack are skipped.
"""

import numpy as np
import pytest

pytest.importorskip("gguf")
pytest.importorskip("ggml")

from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from synthetic import VOCABULARY, decoder_file

from phaseloop.model.load import load_model
from phaseloop.model.weights import open_weights
from phaseloop.ops import ggml_repack
from phaseloop.ops.ggml import GgmlBackend
from phaseloop.ops.ggml_repack import Matrix, centred, repack_type, stability_of
from phaseloop.ops.interface import Span, Weight
from phaseloop.ops.reference import ReferenceBackend

Q4_0, Q4_1 = GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1
PROMPT = np.random.default_rng(1).integers(0, VOCABULARY, 90).tolist()
ROWS = np.random.default_rng(2).standard_normal((256, 4), dtype=np.float32)


@pytest.fixture
def tiny(tmp_path):
    def build(kind, **options):
        weights = open_weights(decoder_file("llama", kind).write(tmp_path / f"{kind}.gguf"))
        model = load_model(weights)
        fixed = {"region_count": 4, "capacity": 256, "threads": 1}
        return GgmlBackend(model.network, weights.tensors, model.dimensions, **(fixed | options))

    return build


def logits(backend, chunk=256):
    for start in range(0, len(PROMPT), chunk):
        part = PROMPT[start : start + chunk]
        row = backend.forward([Span(0, start, part, 1, False)])
    backend.truncate(0, 0)
    return row


def require_repacked(backend):
    if not backend.repacked_bytes:
        pytest.skip("ggml repacks no such type on this CPU")
    return backend


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "IQ4_NL", "Q4_K", "Q2_K"])
def test_a_repacked_model_is_as_near_the_reference_as_one_that_is_not(tmp_path, kind):
    """Both round activations to eight bits by blocks, so both are off by some per cent."""
    weights = open_weights(decoder_file("llama", kind).write(tmp_path / "model.gguf"))
    model = load_model(weights)
    made = model.network, weights.tensors, model.dimensions
    fixed = {"region_count": 1, "capacity": 256}
    repacked = require_repacked(GgmlBackend(*made, **fixed, threads=1))
    exact = logits(ReferenceBackend(*made, **fixed))
    error = distance(logits(repacked), exact)
    plain = GgmlBackend(*made, **fixed, threads=1, repack=False)
    assert 0 < error < 1.25 * distance(logits(plain), exact)
    assert distance(exact[:, ::-1], exact) > 0.5  # what a wrong order of outputs would give


def distance(found, expected):
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


def test_the_name_tells(tiny):
    assert require_repacked(tiny("Q4_0")).name.endswith("-f16-repacked")
    assert tiny("Q4_0", repack=False).name.endswith("-f16")
    assert tiny("F16").name.endswith("-f16")
    assert tiny("F16").repacked_bytes == 0


def test_all_but_the_embedding_is_copied(tiny):
    """Per layer 3 x 256 x 256, 2 x 256 x 256 and 2 x 128 x 256 weights, a head, at 18 bytes in 32.

    The embedding has a head's shape and counts as well: a tied one is both.
    """
    layer, head = (3 + 2) * 256 * 256 + 2 * 128 * 256, VOCABULARY * 256
    assert require_repacked(tiny("Q4_0")).repacked_bytes == (2 * layer + 2 * head) * 18 // 32


def test_offsets_take_a_float_per_block(tiny):
    layer, head = (3 + 2) * 256 * 256 + 2 * 128 * 256, VOCABULARY * 256
    backend = require_repacked(tiny("Q4_1"))
    assert backend.repacked_bytes == (2 * layer + 2 * head) * (18 + 4) // 32


def test_a_centred_matrix_is_the_same_matrix():
    """Each value of Q4_1 is that of Q4_0 and its block's offset, in float32."""
    random = np.random.default_rng(3)
    packed = quantize(random.standard_normal((8, 96), dtype=np.float32) + 0.5, Q4_1)
    weight = Weight("w", "Q4_1", (8, 96), packed.reshape(-1).view(np.uint8))
    halves, offsets = centred(weight)
    assert (halves.kind, halves.shape, offsets.shape) == ("Q4_0", (8, 96), (3, 8))
    found = dequantize(halves.data.reshape(8, -1), Q4_0) + offsets.T.repeat(32, axis=1)
    np.testing.assert_allclose(found, dequantize(packed, Q4_1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("attention", ["tiled", "fast"])
def test_one_stream_does_without_offsets(tiny, attention):
    """Generated tokens have the bits of the file's own order, prompts those of the copies."""
    repacked = require_repacked(tiny("Q4_1", attention=attention))
    plain = tiny("Q4_1", attention=attention, repack=False)
    span = [Span(0, 0, [7], 1, True)]
    assert repacked.forward(span).tobytes() == plain.forward(span).tobytes()
    assert logits(repacked).tobytes() != logits(plain).tobytes()


def test_kernels_that_take_fours_show_their_chunks_unless_rows_are_filled_up(tiny):
    backend = require_repacked(tiny("Q4_K"))
    matrices = backend._repacked.matrices
    if {one.stability for one in matrices.values()} != {"fours"}:
        pytest.skip("rows are stable with these kernels anyhow")
    standard = logits(backend).tobytes()
    assert logits(backend, chunk=7).tobytes() == standard
    unguarded = tiny("Q4_K")
    for name, one in unguarded._repacked.matrices.items():
        unguarded._repacked.matrices[name] = Matrix(one.node, None, "any")
    assert logits(unguarded, chunk=7).tobytes() != standard


def test_a_kernel_that_gives_no_numbers_is_not_used(tiny, monkeypatch):
    require_repacked(tiny("Q4_0"))
    compute = ggml_repack.compute
    tried = []

    def broken(cpu, matrix, rows):
        tried.append(matrix)
        return np.full_like(compute(cpu, matrix, rows), np.nan)

    monkeypatch.setattr(ggml_repack, "compute", broken)
    assert tiny("Q4_0").repacked_bytes == 0
    assert tried


def test_nothing_is_repacked_where_ggml_cannot(tiny, monkeypatch):
    monkeypatch.setattr(ggml_repack, "repack_type", lambda: None)
    assert tiny("Q4_0").repacked_bytes == 0


def test_ggml_has_a_type_that_repacks():
    assert repack_type() is not None


def by_row(rows):
    return rows * 2


def leftovers_apart(rows):
    """Fours as they are, the rest with another rounding."""
    found = rows * 2
    rest = len(rows) % 4
    return np.concatenate([found[: len(rows) - rest], found[len(rows) - rest :] + 1])


def by_place_in_four(rows):
    return rows + (np.arange(len(rows)) % 4)[:, None]


def by_company(rows):
    return rows + len(rows)


@pytest.mark.parametrize(
    ("kernel", "stability"),
    [
        (by_row, "any"),
        (leftovers_apart, "fours"),
        (by_place_in_four, "none"),
        (by_company, "none"),
    ],
)
def test_stability_is_judged_by_bits(kernel, stability):
    assert stability_of(kernel, ROWS, kernel(ROWS)) == stability
