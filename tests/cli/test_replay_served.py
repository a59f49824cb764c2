"""Goal: what `phaseloop serve --trace-content` records over HTTP, `replay --engine` computes again.

Method: a whole server on a tiny model, whose vocabulary is the letters; clients stream, leave, ask
for several answers and come back to a cache.  Its trace is replayed on the model's file.
"""

import json
import signal
from pathlib import Path

import pytest

pytest.importorskip("gguf")
pytest.importorskip("ggml")

from replay_runs import Ran
from serve_process import SIM, ServeProcess, client
from synthetic import VOCABULARY, decoder_file

SETTINGS = {"n_predict": 12, "temperature": 1.3, "ignore_eos": True}


@pytest.fixture
def model(tmp_path) -> Path:
    file = decoder_file("llama", "Q8_0", seed=5)
    letters = [chr(code) for code in range(0x21, 0x7F)]
    unused = [f"<unused{index}>" for index in range(VOCABULARY - len(letters) - 1)]
    file.root |= {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.eos_token_id": len(letters),
        "tokenizer.ggml.tokens": [*letters, "<|end|>", *unused],
        "tokenizer.ggml.token_type": [1] * len(letters) + [3] + [5] * len(unused),
        "tokenizer.ggml.merges": ["a b"],
    }
    return file.write(tmp_path / "letters.gguf")


def test_what_was_served_is_computed_again(model, tmp_path, capsys):
    trace = tmp_path / "run.jsonl"
    flags = ("-m", str(model), "-c", "1024", "-np", "2", "-t", "1", "--policy", "quantum")
    record = ("--trace", str(trace), "--trace-content", "text")
    with ServeProcess(*flags, *record) as server:
        with client(server.ready()) as http:
            for seed in range(3):
                body = {"prompt": "what " * 20, "seed": seed} | SETTINGS
                assert http.post("/completion", json=body).status_code == 200
            several = {"prompt": ["one", "two"], "n": 2, "max_tokens": 5, "logit_bias": {"7": -100}}
            assert http.post("/v1/completions", json=several).status_code == 200
            endless = {"prompt": "on", "n_predict": 400, "stream": True, "ignore_eos": True}
            with http.stream("POST", "/completion", json=endless) as answer:
                next(answer.iter_bytes())
        server.signal(signal.SIGTERM)
        assert server.end() == 0
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    prompts = [line for line in lines if line["line"] == "prompt"]
    assert prompts[0]["text"] == "what " * 20 and prompts[0]["seed"] == 0
    assert [line["text"] for line in prompts[3:5]] == ["one", "two"]
    ran = Ran(capsys, "--engine", "-m", model, trace, "-t", 1, "--json")
    found = ran.object()
    assert (ran.code, found["differences"]) == (0, [])
    assert found["compared"]["tokens"] >= 3 * 12 + 4 * 5 + 1


def test_a_trace_has_one_server(tmp_path):
    trace = tmp_path / "run.jsonl"
    flags = (*SIM, "--trace", str(trace))
    with ServeProcess(*flags) as server:
        with client(server.ready()) as http:
            assert http.post("/completion", json={"prompt": "a", "n_predict": 1}).is_success
        with ServeProcess(*flags) as second:
            assert second.end() == 2
        assert "is being written by another process" in second.other[0]
        server.signal(signal.SIGTERM)
        assert server.end() == 0
    assert [path.name for path in tmp_path.iterdir()] == ["run.jsonl"], "nothing was moved aside"
