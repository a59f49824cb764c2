"""Goal: adapters over HTTP do what is said of them, in files, in traces and in errors.

Method: a tiny model with two adapters behind real servers; whose answers differ by list, so that
any confusion shows.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("gguf")
pytest.importorskip("ggml")

from adapter_files import AdapterFile
from hybrid_files import with_words
from serve_process import ServeProcess, client
from synthetic import decoder_file

PROMPT = [(7 * index) % 97 for index in range(60)]
OTHER = [(11 * index) % 97 for index in range(60)]
BASE = [{"id": 0, "scale": 0}]


class Files:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        file = decoder_file("llama", "Q4_K")
        names = [name for name, (values, _) in file.tensors.items() if values.ndim > 1]
        self.adapters = [AdapterFile(file, names, rank=rank, seed=rank) for rank in (3, 8)]
        self.adapters[0].metadata["adapter.lora.task_name"] = "poetry"
        self.first, self.second = (
            one.write(folder / f"{number}.gguf") for number, one in enumerate(self.adapters)
        )
        self.model = with_words(file).write(folder / "model.gguf")

    def serve(self, *further: str) -> ServeProcess:
        common = ("-m", str(self.model), "-c", "1024", "-np", "2", "-t", "1")
        return ServeProcess(*common, *further)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("lora"))


@pytest.fixture(scope="module")
def http(files: Files) -> Iterator[httpx.Client]:
    flags = ("--lora", str(files.first), "--lora-scaled", f"{files.second}:0.5")
    with files.serve(*flags) as server, client(server.ready()) as opened:
        yield opened


def ask(http: httpx.Client, lora: object = None, **fields: object) -> httpx.Response:
    body = {"prompt": PROMPT, "n_predict": 8, "temperature": 0, "n_probs": 2, "lora": lora,
            "return_tokens": True, "ignore_eos": True}  # fmt: skip
    return http.post("/completion", json=body | fields)


def bits(answer: httpx.Response) -> Any:
    found = answer.raise_for_status().json()
    return found["tokens"], found["completion_probabilities"]


def test_what_is_loaded_is_listed_in_order(http: httpx.Client, files: Files):
    first, second = http.get("/lora-adapters").json()
    assert first == {"id": 0, "path": str(files.first), "scale": 1.0, "task_name": "poetry",
                     "prompt_prefix": ""}  # fmt: skip
    assert (second["id"], second["path"], second["scale"]) == (1, str(files.second), 0.5)


def test_a_request_that_names_none_gets_what_holds_for_all(http: httpx.Client):
    both = [{"id": 1, "scale": 0.5}, {"id": 0, "scale": 1}]
    answer = ask(http)
    assert answer.json()["generation_settings"]["lora"] == [
        {"id": 0, "scale": 1.0},
        {"id": 1, "scale": 0.5},
    ]
    assert bits(answer) == bits(ask(http, [])) == bits(ask(http, both))
    lists = [None, BASE, [{"id": 0, "scale": 1}], [{"id": 1, "scale": 0.5}]]
    assert len({str(bits(ask(http, lora))) for lora in lists}) == len(lists)


def test_the_scales_of_later_requests_can_be_changed(http: httpx.Client):
    wanted = bits(ask(http, [{"id": 1, "scale": -2.0}]))
    answer = http.post("/lora-adapters", json=[{"id": 1, "scale": -2}])
    assert answer.json() == {"success": True}
    try:
        assert [one["scale"] for one in http.get("/lora-adapters").json()] == [0.0, -2.0]
        assert bits(ask(http)) == wanted
    finally:
        restored = [{"id": 0, "scale": 1.0}, {"id": 1, "scale": 0.5}]
        http.post("/lora-adapters", json=restored).raise_for_status()


WRONG: dict[str, tuple[object, str]] = {
    "no list": ({"id": 0}, "list"),
    "no object": ([0], "[0]: must be an object"),
    "no id": ([{"scale": 1}], "[0].id: missing"),
    "no scale": ([{"id": 0}], "[0].scale: missing"),
    "beyond": ([{"id": 2, "scale": 1}], "[0].id: there is no such adapter; there are 2"),
    "below": ([{"id": -1, "scale": 1}], "[0].id: there is no such adapter"),
    "text": ([{"id": "0", "scale": 1}], "[0].id: must be an integer"),
    "huge": ([{"id": 0, "scale": 1e39}], "[0].scale: must be a number of 32 bits"),
    "twice": ([{"id": 0, "scale": 1}, {"id": 0, "scale": 2}], "[1].id: 0 is in the list twice"),
}


@pytest.mark.parametrize(("lora", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_list_is_refused_by_name(http: httpx.Client, lora: object, message: str):
    answers = [ask(http, lora), http.post("/lora-adapters", json=lora)]
    for answer in answers:
        assert answer.status_code == 400
        assert message in answer.json()["error"]["message"]
    assert [one["scale"] for one in http.get("/lora-adapters").json()] == [1.0, 0.5]


def test_a_server_without_adapters_says_so(files: Files):
    with files.serve() as server, client(server.ready()) as http:
        assert http.get("/lora-adapters").json() == []
        assert ask(http).json()["generation_settings"]["lora"] == []
        refused = ask(http, [{"id": 0, "scale": 1}])
        assert refused.status_code == 400 and "--lora" in refused.json()["error"]["message"]


def test_adapters_can_be_loaded_and_left_alone(files: Files, http: httpx.Client):
    with (
        files.serve("--lora", str(files.first), "--lora-init-without-apply") as server,
        client(server.ready()) as quiet,
    ):
        assert bits(ask(quiet)) == bits(ask(http, BASE))
        asked = [{"id": 0, "scale": 1}]
        assert bits(ask(quiet, asked)) == bits(ask(http, asked))


@pytest.mark.timeout(120)
def test_a_slot_file_serves_its_own_adapters(files: Files, tmp_path: Path, http: httpx.Client):
    """Wherever they are loaded, whatever their id is there."""
    flag = ("--slot-save-path", str(tmp_path))
    only = [{"id": 0, "scale": 1}]
    with files.serve("--lora", str(files.first), *flag) as server, client(server.ready()) as one:
        ask(one, only, id_slot=0).raise_for_status()
        one.post("/slots/0?action=save", json={"filename": "a"}).raise_for_status()
    with (
        files.serve("--lora", f"{files.second},{files.first}", *flag) as server,
        client(server.ready()) as one,
    ):
        one.post("/slots/0?action=restore", json={"filename": "a"}).raise_for_status()
        found = ask(one, [{"id": 1, "scale": 1}], id_slot=0)
        assert found.json()["timings"]["cache_n"] == len(PROMPT) - 1
        assert bits(found) == bits(ask(http, only))
        one.post("/slots/0?action=restore", json={"filename": "a"}).raise_for_status()
        assert ask(one, BASE, id_slot=0).json()["timings"]["cache_n"] == 0
    with files.serve("--lora", str(files.second), *flag) as server, client(server.ready()) as one:
        refused = one.post("/slots/0?action=restore", json={"filename": "a"})
        assert refused.status_code == 400
        assert "which is not loaded" in refused.json()["error"]["message"]


@pytest.mark.timeout(120)
def test_a_trace_is_run_again_with_its_adapters(files: Files, tmp_path: Path):
    trace = tmp_path / "run.jsonl"
    flags = ("--trace", str(trace), "--trace-content", "ids", "--lora", str(files.first))
    with files.serve(*flags) as server, client(server.ready()) as http:
        for lora in (None, BASE, [{"id": 0, "scale": 0.25}]):
            ask(http, lora, prompt=PROMPT if lora else OTHER).raise_for_status()
        server.process.terminate()
        assert server.end() == 0
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    prompts = [line for line in lines if line["line"] == "prompt"]
    assert [line.get("adapters") for line in prompts] == [[[0, 1.0]], None, [[0, 0.25]]]
    groups = [
        request.get("adapter", 0)
        for line in lines
        if line["line"] == "event" and line["event"]["event"] == "RequestArrived"
        for request in line["event"]["requests"]
    ]
    assert len(set(groups)) == 3 and groups[1] == 0

    def replay(*lora: Path) -> subprocess.CompletedProcess[str]:
        named = [word for path in lora for word in ("--lora", str(path))]
        line = [sys.executable, "-m", "phaseloop", "replay", "--engine", "-m", str(files.model)]
        return subprocess.run(
            [*line, *named, str(trace)], capture_output=True, text=True, check=False
        )

    again = replay(files.first)
    assert again.returncode == 0 and "tokens equal" in again.stdout, again.stderr
    assert "was made with 1 adapter, and 0 are" in replay().stderr
    assert "is not adapter 0 of the trace" in replay(files.second).stderr


def test_an_adapter_of_another_base_ends_the_start_with_a_sentence(files: Files):
    with files.serve("--lora", str(files.model)) as server:
        assert server.end() == 2
    said = " ".join([*server.other, *(str(line) for line in server.lines)])
    assert "general.type is 'model', not 'adapter'" in said and "Traceback" not in said
