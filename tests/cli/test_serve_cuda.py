"""Goal: `phaseloop serve --device cuda-host` serves what the engine computes, and says what does.

Method: a tiny model in a process of its own, its layers on two shims; one answer, and what server
and trace say of the engine.  Then what is said where there is no GPU.
"""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("gguf")
pytest.importorskip("ggml")

sys.path.insert(0, str(Path(__file__).parent.parent / "model"))

from hybrid_files import with_words
from serve_process import ServeProcess, client
from synthetic import decoder_file


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    file = decoder_file("llama", "Q8_0")
    with_words(file)
    return str(file.write(tmp_path_factory.mktemp("model") / "tiny.gguf"))


def test_a_model_is_served_by_the_shim(model, tmp_path):
    trace = tmp_path / "trace.jsonl"
    line = ("-m", model, "--device", "cuda-host", "-ts", "1,2", "-c", "512", "-np", "2")
    with ServeProcess(*line, "-ub", "64", "--trace", str(trace)) as server:
        url = server.url()
        ready = server.until("ready")
        assert ready["engine"] == "cuda-host-f16"
        plans = [one["plan"] for one in server.lines if one["event"] == "memory"]
        assert [plan[:15] for plan in plans] == ["GPU 0: 1 layers", "GPU 1: 1 layers"]
        with client(url) as http:
            asked = {"prompt": [1, 2, 3], "n_predict": 6, "temperature": 0}
            answer, again = (http.post("/completion", json=asked).json() for _ in range(2))
            props = http.get("/props").json()
        assert answer["tokens_predicted"] == 6 and again["content"] == answer["content"]
        assert props["phaseloop"]["engine"] == "cuda-host-f16"
    header = json.loads(trace.read_text().splitlines()[0])
    assert header["engine"] == "cuda-host-f16"


def test_cuda_without_a_gpu_says_what_to_do(model, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with ServeProcess("-m", model, "--device", "cuda") as server:
        assert server.end() == 2
        told = " ".join(server.other)
        assert "--device cuda" in told and "--device cpu" in told and "Traceback" not in told
