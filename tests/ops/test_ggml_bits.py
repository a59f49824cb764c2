"""Goal: the bits of a sequence's logits depend on its own tokens and on nothing else.

Method: tiny models; one prompt and eight generated tokens alone, in one pass, on one thread, are
the standard; every other way of computing them must give the same bytes.  The path `fast` must not:
a test that would pass on anything is worth nothing.
"""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf")
pytest.importorskip("ggml")

from synthetic import VOCABULARY, decoder_file, gemma_file

from phaseloop.model.load import load_model
from phaseloop.model.weights import open_weights
from phaseloop.ops import ggml_graph
from phaseloop.ops.ggml import GgmlBackend
from phaseloop.ops.interface import Aborted, BackendError, Span

PROMPT = np.random.default_rng(1).integers(0, VOCABULARY, 300).tolist()
OTHER = np.random.default_rng(2).integers(0, VOCABULARY, 130).tolist()
ANSWER = np.random.default_rng(4).integers(0, VOCABULARY, 8).tolist()
CAPACITY = 1024
MODELS = {
    "F16": lambda: decoder_file("llama", "F16"),
    "Q4_1": lambda: decoder_file("llama", "Q4_1"),
    "Q4_K": lambda: decoder_file("llama", "Q4_K"),
    "Q5_K": lambda: decoder_file("llama", "Q5_K"),
    "Q6_K": lambda: decoder_file("llama", "Q6_K"),
    "IQ4_XS": lambda: decoder_file("llama", "IQ4_XS"),
    "mixture": lambda: decoder_file("qwen3moe", "Q4_0", experts=True, head_norms=True),
    "windows": lambda: gemma_file("Q4_0"),
}


class Tiny:
    """One tiny model on disk, and backends for it."""

    def __init__(self, path, file):
        self.weights = open_weights(file.write(path / "tiny.gguf"))
        self.model = load_model(self.weights)

    def backend(self, **options):
        options = {"region_count": 4, "capacity": CAPACITY, "threads": 1} | options
        return GgmlBackend(
            self.model.network, self.weights.tensors, self.model.dimensions, **options
        )


@pytest.fixture(scope="module", params=MODELS)
def tiny(request, tmp_path_factory):
    return Tiny(tmp_path_factory.mktemp(request.param), MODELS[request.param]())


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return Tiny(tmp_path_factory.mktemp("plain"), MODELS["Q4_K"]())


def alone(backend, region=0, prompt=PROMPT, chunk=None, neighbours=()):
    """The bytes of the logits: last prompt row, then a row per generated token."""
    rows = []
    step = chunk or len(prompt)
    for start in range(0, len(prompt), step):
        part = prompt[start : start + step]
        is_last = start + step >= len(prompt)
        span = Span(region, start, part, int(is_last), False)
        rows.append(backend.forward([span])[:1])
    for index, token in enumerate(ANSWER):
        mine = Span(region, len(prompt) + index, [token], 1, True)
        spans = [*neighbours_at(neighbours, index), mine]
        rows.append(backend.forward(spans)[-1:])
    return np.concatenate(rows).tobytes()


def neighbours_at(neighbours, index):
    return [Span(region, start + index, [5], 1, True) for region, start in neighbours]


@pytest.mark.parametrize("cache", ["F16", "Q8_0"])
def test_chunks_threads_regions_and_passes_do_not_show(tiny, cache):
    backend = tiny.backend(cache=cache)
    standard = alone(backend)
    for chunk in (3, 7, 64, 130):
        backend.truncate(0, 0)
        assert alone(backend, chunk=chunk) == standard, chunk
    assert alone(backend, region=3) == standard
    assert alone(tiny.backend(cache=cache, threads=2)) == standard
    assert alone(tiny.backend(cache=cache, ubatch=32)) == standard
    assert alone(tiny.backend(cache=cache, capacity=5000, region_count=2)) == standard


@pytest.mark.parametrize("cache", ["F16", "Q8_0"])
def test_neighbours_do_not_show(tiny, cache):
    standard = alone(tiny.backend(cache=cache))
    backend = tiny.backend(cache=cache, threads=2)
    together = backend.forward(
        [
            Span(3, 0, OTHER, 1, False),
            Span(1, 0, PROMPT, 1, False),
            Span(0, 0, OTHER[:5], 5, False),
            Span(2, 0, OTHER[:1], 0, False),
        ]
    )
    rows = [together[1:2]]
    for index, token in enumerate(ANSWER):
        lanes = [
            Span(2, 1 + index, [3], 1, True),
            Span(1, len(PROMPT) + index, [token], 1, True),
            Span(0, 5 + index, [4], 1, True),
        ]
        rows.append(backend.forward(lanes[index % 2 :])[1 - index % 2][None])
    assert np.concatenate(rows).tobytes() == standard


@pytest.mark.parametrize("attention", ["tiled", "rows"])
def test_prompts_of_one_token_in_neighbouring_regions_do_not_show(plain, attention):
    backend = plain.backend(attention=attention)
    single = [backend.forward([Span(0, 0, [token], 1, False)]) for token in (3, 4, 5)]
    spans = [Span(region, 0, [token], 1, False) for region, token in enumerate((3, 4, 5))]
    assert backend.forward(spans).tobytes() == np.concatenate(single).tobytes()


def test_a_mixed_pass_does_not_show(plain):
    standard = alone(plain.backend())
    backend = plain.backend()
    rows = [backend.forward([Span(0, 0, PROMPT, 1, False)])]
    for index, token in enumerate(ANSWER):
        prompt = Span(1, 9 * index, OTHER[9 * index : 9 * index + 9], 1, False)
        spans = [prompt, Span(0, len(PROMPT) + index, [token], 1, True)]
        rows.append(backend.forward(spans)[1:])
    assert np.concatenate(rows).tobytes() == standard


def test_what_a_region_held_before_does_not_show(plain):
    backend = plain.backend()
    standard = alone(backend)
    alone(backend, prompt=OTHER + PROMPT)
    backend.truncate(0, 0)
    assert alone(backend) == standard
    backend.truncate(0, 100)  # a cached prefix
    logits = backend.forward([Span(0, 100, PROMPT[100:], 1, False)])
    assert logits.tobytes() == standard[: logits.nbytes]


def test_copies_and_snapshots_hold_the_same(plain):
    backend = plain.backend()
    standard = alone(backend)
    backend.copy(0, 2, 200)
    snapshot = backend.save(0, 200)
    backend.truncate(0, 0)
    backend.restore(1, snapshot)
    backend.restore(3, snapshot)
    for region in (1, 2, 3):
        logits = backend.forward([Span(region, 200, PROMPT[200:], 1, False)])
        assert logits.tobytes() == standard[: logits.nbytes]
    assert snapshot.size_bytes == 200 * backend.position_bytes


def test_the_path_of_rows_treats_generated_tokens_as_prompt(plain):
    backend = plain.backend(attention="rows")
    assert backend.generated_like_prompt
    standard = alone(backend)
    backend.truncate(0, 0)
    prompt = PROMPT + ANSWER
    logits = backend.forward([Span(0, 0, prompt, len(ANSWER) + 1, False)])
    assert logits.tobytes() == standard


def test_the_fast_path_shows_its_chunks(plain):
    backend = plain.backend(attention="fast")
    standard = alone(backend)
    backend.truncate(0, 0)
    assert alone(backend, chunk=7) != standard


@pytest.mark.parametrize("attention", ["tiled", "fast"])
def test_unpacking_keys_and_values_beforehand_does_not_show(plain, monkeypatch, attention):
    unpacking, not_unpacking = (
        plain.backend(attention=attention),
        plain.backend(attention=attention),
    )
    casts = []
    cast = ggml_graph.ggml.ggml_cast
    monkeypatch.setattr(ggml_graph.ggml, "ggml_cast", lambda *a: casts.append(a) or cast(*a))
    standard = alone(unpacking)
    count = len(casts)
    assert count
    monkeypatch.setattr(ggml_graph, "UNPACKED_BYTES_MAX", 0)
    assert alone(not_unpacking) == standard
    assert len(casts) == count


def test_an_aborted_pass_ends_and_the_next_is_whole(plain):
    backend = plain.backend()
    standard = alone(backend)
    backend.abort()
    with pytest.raises(Aborted):
        backend.forward([Span(1, 0, PROMPT, 1, False)])
    backend.resume()
    backend.truncate(0, 0)
    assert alone(backend) == standard


def test_truncation_gives_memory_back(plain):
    backend = plain.backend(region_count=2, capacity=65_536)
    backend.forward([Span(0, 0, PROMPT[:1], 0, False)])
    snapshot = backend.save(0, 60_000)  # untouched pages read as zeros
    before = resident_kb()
    backend.restore(1, snapshot)
    held = resident_kb()
    size_kb = snapshot.size_bytes // 1024
    assert held - before > size_kb * 0.9
    backend.truncate(1, 0)
    backend.truncate(0, 0)
    assert held - resident_kb() > size_kb * 0.9


def resident_kb():
    with Path("/proc/self/smaps_rollup").open() as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("Rss:"))


BAD = {
    "no lanes": [],
    "share a KV region": [Span(0, 0, [1], 1, False), Span(0, 1, [1], 1, False)],
    "KV region 4 of 4": [Span(4, 0, [1], 1, False)],
    "2 outputs of 1 tokens": [Span(0, 0, [1], 2, False)],
    "0 outputs of 0 tokens": [Span(0, 0, [], 0, False)],
    "positions 1023 to 1025": [Span(0, CAPACITY - 1, [1, 1], 1, False)],
    "positions -1 to 0": [Span(0, -1, [1], 1, False)],
    f"token ids 0 to {VOCABULARY}": [Span(0, 0, [0, VOCABULARY], 1, False)],
    "token ids -1 to 0": [Span(0, 0, [0, -1], 1, False)],
}


@pytest.mark.parametrize("message", BAD)
def test_a_batch_that_does_not_fit_is_refused(plain, message):
    expected = "at least one lane" if message == "no lanes" else message
    with pytest.raises(BackendError, match=expected):
        plain.backend().forward(BAD[message])


def test_impossible_options_are_refused(plain):
    with pytest.raises(BackendError, match="0 threads"):
        plain.backend(threads=0)
    with pytest.raises(BackendError, match="lower the context"):
        plain.backend(capacity=1 << 50)
