"""Goal: servers for embeddings, for ranking, and pretending ones: from a command line to vectors.

Method: tiny encoders in files, servers in processes of their own.  A vector of a file is compared
with that of the float64 reference; a trace is replayed.
"""

import math
import subprocess

import numpy as np
import pytest

pytest.importorskip("gguf")
pytest.importorskip("ggml")

from encoder_files import POSITIONS, encoder_file
from serve_process import PHASELOOP, SIM, ServeProcess, client

from phaseloop.model.embedding import encoder_of
from phaseloop.model.load import load_model
from phaseloop.model.weights import open_weights
from phaseloop.ops.interface import Span
from phaseloop.ops.reference import ReferenceBackend
from phaseloop.text.metadata import vocabulary_of
from phaseloop.text.tokenizer import Tokenizer

TEXTS = ["the cat sat on a mat", "rain falls in spring"]


def expected(path, text):
    weights = open_weights(path)
    encoder, _ = encoder_of(load_model(weights), weights, "none")
    tokens = Tokenizer(vocabulary_of(weights.metadata)).encode(text, add_special=True)
    oracle = ReferenceBackend(
        encoder.network, weights.tensors, encoder.dimensions, region_count=1, capacity=POSITIONS
    )
    mean = oracle.forward([Span(0, 0, tokens, len(tokens), False)]).mean(axis=0)
    return mean / np.linalg.norm(mean)


def test_an_encoder_is_served_traced_and_replayed(tmp_path):
    path = encoder_file().write(tmp_path / "tiny.gguf")
    trace = tmp_path / "trace.jsonl"
    flags = ("--embeddings", "--trace", str(trace), "--trace-content", "ids")
    with ServeProcess("-m", str(path), "-t", "1", *flags) as server:
        url = server.ready()
        with client(url) as http:
            made = http.post("/v1/embeddings", json={"input": TEXTS}).raise_for_status().json()
            alone = http.post("/v1/embeddings", json={"input": TEXTS[1]}).json()
            long = http.post("/v1/embeddings", json={"input": [5] * (POSITIONS + 1)})
            refused = http.post("/completion", json={"prompt": "the"})
            figures = http.get("/props").json()
        server.process.terminate()
        assert server.end() == 0
    for one, text in zip(made["data"], TEXTS, strict=True):
        assert np.dot(one["embedding"], expected(path, text)) > 1 - 1e-5
    assert alone["data"][0]["embedding"] == made["data"][1]["embedding"]
    assert (long.status_code, refused.status_code) == (400, 501)
    assert f"holds {POSITIONS}" in long.json()["error"]["message"]
    assert figures["phaseloop"]["pooling"] == "mean" and figures["phaseloop"]["unstable"] == []
    replayed = subprocess.run(
        [*PHASELOOP, "replay", str(trace)], capture_output=True, text=True, check=False
    )
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    again = subprocess.run(
        [*PHASELOOP, "replay", str(trace), "--engine", "-m", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert again.returncode == 2 and "a trace holds no vectors" in again.stderr


def test_a_ranking_model_is_served(tmp_path):
    path = encoder_file(labels=1, pooling=4).write(tmp_path / "tiny.gguf")
    with (
        ServeProcess("-m", str(path), "-t", "1", "--reranking") as server,
        client(server.ready()) as http,
    ):
        wanted = {"query": "the dog", "documents": TEXTS}
        made = http.post("/v1/rerank", json=wanted).raise_for_status().json()
    scores = [one["relevance_score"] for one in made["results"]]
    assert scores == sorted(scores, reverse=True)
    assert {one["index"] for one in made["results"]} == {0, 1}


def test_a_pretending_server_gives_equal_texts_equal_vectors():
    def vectors():
        flags = (*SIM, "--sim-speed", "0", "--embeddings")
        with ServeProcess(*flags) as server, client(server.ready()) as http:
            wanted = {"input": ["the cat", "the cats", "7 %", "the cat"]}
            data = http.post("/v1/embeddings", json=wanted).raise_for_status().json()["data"]
        return [one["embedding"] for one in data]

    cat, cats, other, again = made = vectors()
    assert cat == again and made == vectors()
    assert math.isclose(math.hypot(*cat), 1.0, rel_tol=1e-6)
    assert np.dot(cat, cats) > np.dot(cat, other)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ((), "an encoder, which cannot generate; serve it with --embeddings"),
        (("--reranking",), "there is no classifier"),
    ],
)
def test_what_a_file_is_not_for_is_said(tmp_path, flags, problem):
    path = encoder_file().write(tmp_path / "tiny.gguf")
    with ServeProcess("-m", str(path), "-t", "1", *flags) as server:
        assert server.end() == 2
    assert any(problem in line for line in server.other)
