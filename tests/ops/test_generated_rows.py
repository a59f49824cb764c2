"""Goal: a generated row has the same bits however many of its lane go together in one pass.

Method: tiny models of every kind, hybrids among them.  A prompt and twenty generated tokens, one
per pass, are the standard; then the same tokens in passes of any size, beside lanes of other sizes,
and again after rejected ones were cut off.  Logits must be the same bytes.
"""

import numpy as np
import pytest

pytest.importorskip("gguf")
pytest.importorskip("ggml")

from hybrid_files import hybrid_file
from synthetic import VOCABULARY, decoder_file, gemma_file

from phaseloop.model.load import load_model
from phaseloop.model.weights import open_weights
from phaseloop.ops.ggml import GgmlBackend
from phaseloop.ops.interface import Span

RANDOM = np.random.default_rng(5)
PROMPT, OTHER, ANSWER, WRONG = (
    RANDOM.integers(0, VOCABULARY, count).tolist() for count in (230, 70, 20, 9)
)
MODELS = {
    "F16": lambda: decoder_file("llama", "F16"),
    "Q4_1": lambda: decoder_file("llama", "Q4_1"),
    "Q4_K": lambda: decoder_file("llama", "Q4_K"),
    "Q6_K": lambda: decoder_file("llama", "Q6_K"),
    "mixture": lambda: decoder_file("qwen3moe", "Q4_0", experts=True, head_norms=True),
    "windows": lambda: gemma_file("Q4_0"),
    "hybrid": lambda: hybrid_file("Q4_K"),
    "hybrid-mixture": lambda: hybrid_file("Q5_K", mixture=True, fused=True),
}
# Short and long ones, over the boundaries of tiles and blocks of positions (256 lies within).
SIZES = ([1] * 20, [3, 17], [7, 1, 5, 4, 3])


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    weights = open_weights(MODELS[request.param]().write(tmp_path_factory.mktemp("m") / "m.gguf"))
    return weights, load_model(weights)


def backend_of(model, **options):
    weights, loaded = model
    options = {"region_count": 3, "capacity": 512, "threads": 1} | options
    return GgmlBackend(loaded.network, weights.tensors, loaded.dimensions, **options)


def generated(backend, start, tokens, company=()):
    """The logits of every row of one pass of the lane in region 1."""
    lane = Span(1, start, tokens, len(tokens), True)
    before = sum(span.outputs for span in company)
    return backend.forward([*company, lane])[before : before + len(tokens)]


def answered(backend, sizes):
    backend.truncate(1, 0)
    backend.forward([Span(1, 0, PROMPT, 1, False)])
    rows, taken = [], 0
    for size in sizes:
        rows.append(generated(backend, len(PROMPT) + taken, ANSWER[taken : taken + size]))
        taken += size
    return np.concatenate(rows)


@pytest.mark.parametrize(
    ("cache", "attention"), [("F16", "tiled"), ("Q8_0", "tiled"), ("F16", "rows")]
)
def test_the_size_of_a_pass_does_not_show(model, cache, attention):
    backend = backend_of(model, cache=cache, attention=attention)
    standard = answered(backend, SIZES[0])
    for sizes in SIZES[1:]:
        assert answered(backend, sizes).tobytes() == standard.tobytes(), sizes
    two_threads = backend_of(model, cache=cache, attention=attention, threads=2, ubatch=32)
    assert answered(two_threads, [5, 15]).tobytes() == standard.tobytes()


def test_lanes_of_other_sizes_beside_it_do_not_show(model):
    backend = backend_of(model, threads=2)
    standard = answered(backend, SIZES[0])
    backend.truncate(1, 0)
    backend.forward([Span(1, 0, PROMPT, 1, False), Span(0, 0, OTHER, 1, False)])
    company = [Span(0, len(OTHER), WRONG[:3], 3, True), Span(2, 0, OTHER[:1], 1, True)]
    rows = [
        generated(backend, len(PROMPT), ANSWER[:4], company),
        generated(backend, len(PROMPT) + 4, ANSWER[4:]),
    ]
    assert np.concatenate(rows).tobytes() == standard.tobytes()


def test_rejected_rows_leave_nothing(model):
    """Cut back to before the pass, and the accepted ones computed again, as the engine does it."""
    backend = backend_of(model)
    standard = answered(backend, SIZES[0])
    backend.truncate(1, 0)
    start = len(PROMPT)
    backend.forward([Span(1, 0, PROMPT, 1, False)])
    generated(backend, start, [*ANSWER[:2], *WRONG])
    backend.truncate(1, start)
    rows = generated(backend, start, ANSWER)
    assert rows.tobytes() == standard.tobytes()


def test_one_other_token_shows(model):
    """The comparison notices: rows after a token depend on it."""
    backend = backend_of(model)
    standard = answered(backend, [20])
    backend.truncate(1, 0)
    backend.forward([Span(1, 0, PROMPT, 1, False)])
    other = [(ANSWER[0] + 1) % VOCABULARY, *ANSWER[1:]]
    assert (generated(backend, len(PROMPT), other) != standard).any(axis=1).all()
