"""Goal: a slot saved to disk comes back with the bits that computing it afresh would give.

Method: tiny models behind real servers, one after the other over one directory; the measure is the
answer of a server that never saw a file.
"""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("gguf")
pytest.importorskip("ggml")

from hybrid_files import hybrid_file, with_words
from serve_process import SIM, ServeProcess, client
from synthetic import decoder_file

from phaseloop.cli.main import main

PROMPT = [(7 * index) % 97 for index in range(150)]
LONGER = [*PROMPT, 3, 1, 4, 1, 5]
FILES = {
    "llama": lambda: decoder_file("llama", "Q4_K"),
    "hybrid": lambda: hybrid_file("Q4_K"),
}


@pytest.fixture(scope="module", params=sorted(FILES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("slots") / f"{request.param}.gguf"
    return with_words(FILES[request.param]()).write(path)


def serve(model: Path, *further: str) -> ServeProcess:
    return ServeProcess("-m", str(model), "-c", "512", "-np", "2", "-t", "1", *further)


def ask(http: httpx.Client, prompt: list[int], slot: int) -> dict[str, Any]:
    body = {"prompt": prompt, "n_predict": 12, "seed": 5, "id_slot": slot, "n_probs": 2,
            "return_tokens": True, "ignore_eos": True}  # fmt: skip
    return http.post("/completion", json=body).raise_for_status().json()


def act(http: httpx.Client, slot: object, action: str, name: str | None = None) -> httpx.Response:
    body = {} if name is None else {"filename": name}
    return http.post(f"/slots/{slot}?action={action}", json=body)


def bits(answer: dict[str, Any]) -> tuple[Any, ...]:
    return answer["tokens"], answer["completion_probabilities"]


def cached(http: httpx.Client, slot: int) -> int:
    return http.get("/slots").json()[slot]["n_prompt_tokens_cache"]


@pytest.mark.timeout(120)
def test_after_a_restart_the_bits_are_those_of_a_cold_prompt(model: Path, tmp_path: Path):
    with serve(model) as server, client(server.ready()) as http:
        cold = ask(http, LONGER, 0)
        assert act(http, 0, "save", "a").status_code == 501, "not without a directory"
    flag = ("--slot-save-path", str(tmp_path))
    with serve(model, *flag) as server, client(server.ready()) as http:
        ask(http, PROMPT, 0)
        saved = act(http, 0, "save", "agent.bin").raise_for_status().json()
        after = ask(http, LONGER, 0)
    written = tmp_path / "agent.bin"
    assert saved["n_saved"] == len(PROMPT) and saved["n_written"] == written.stat().st_size
    assert saved["id_slot"] == 0 and saved["filename"] == "agent.bin"
    assert [path.name for path in tmp_path.iterdir()] == ["agent.bin"]
    with serve(model, *flag) as server, client(server.ready()) as http:
        restored = act(http, 1, "restore", "agent.bin").raise_for_status().json()
        held = cached(http, 1)
        warm = ask(http, LONGER, 1)
        again = act(http, 0, "restore", "agent.bin")
    assert restored["n_restored"] == len(PROMPT) and restored["n_read"] == saved["n_written"]
    assert held == len(PROMPT)
    assert warm["timings"]["cache_n"] == len(PROMPT), "nothing of it is computed again"
    assert bits(cold) == bits(after) == bits(warm)
    assert again.status_code == 200, "a file is not consumed"


@pytest.mark.timeout(120)
def test_what_cannot_be_taken_is_refused_by_name_and_harms_nothing(model: Path, tmp_path: Path):
    with serve(model, "--slot-save-path", str(tmp_path)) as server, client(server.ready()) as http:
        assert "holds nothing" in act(http, 0, "save", "a").json()["error"]["message"]
        whole = ask(http, PROMPT, 0)
        act(http, 0, "save", "good").raise_for_status()
        spoil(tmp_path)
        for name, why in SPOILT.items():
            refused = act(http, 1, "restore", name)
            assert refused.status_code == 400, name
            assert why in refused.json()["error"]["message"], name
        for name in ("", ".hidden", "../up", "a/b", "a\\b", "x" * 256, "a\0b", " a", "ü" * 200):
            assert act(http, 0, "save", name).status_code == 400, name
            assert act(http, 0, "restore", name).status_code == 400, name
        (tmp_path / "folder").mkdir()
        for action, why in (("save", "is a directory"), ("restore", "no such file")):
            refused = act(http, 0, action, "folder")
            assert refused.status_code == 400 and why in refused.json()["error"]["message"]
        for slot in ("2", "-1", "x", "9" * 30):
            assert act(http, slot, "save", "a").status_code == 400
        assert "action" in act(http, 0, "copy", "a").json()["error"]["message"]
        names = {path.name for path in tmp_path.iterdir()}
        assert names == {"good", "folder", *SPOILT} - {"missing"}
        assert bits(ask(http, PROMPT, 0)) == bits(whole)


SPOILT = {
    "cut": "no slot file, or a part of one",
    "edited": "was cut or edited",
    "junk": "no slot file",
    "empty": "no slot file",
    "model": "state of another model",
    "engine": "another engine",
    "format": "another version of phaseloop",
    "missing": "no such file",
}


def spoil(directory: Path) -> None:
    good = (directory / "good").read_bytes()
    edited = bytearray(good)
    edited[-3] ^= 1
    made: dict[str, bytes] = {
        "cut": good[: len(good) // 2],
        "edited": bytes(edited),
        "junk": b"GGUF" * 100,
        "empty": b"",
        "model": swapped(good, b'"model":"', lambda value: value[::-1]),
        "engine": swapped(good, b'"engine":"', lambda value: b"x" * len(value)),
        "format": swapped(good, b'"format":"', lambda value: value[:-1] + b"2"),
    }
    for name, content in made.items():
        (directory / name).write_bytes(content)


def swapped(file: bytes, key: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """The header's member changed in place, to a value of the same length."""
    start = file.index(key) + len(key)
    end = file.index(b'"', start)
    return file[:start] + change(file[start:end]) + file[end:]


@pytest.mark.timeout(120)
def test_an_erased_slot_holds_nothing(model: Path, tmp_path: Path):
    with serve(model, "--slot-save-path", str(tmp_path)) as server, client(server.ready()) as http:
        assert act(http, 0, "erase").json() == {"id_slot": 0, "n_erased": 0}
        first = ask(http, PROMPT, 0)
        held = cached(http, 0)
        assert act(http, 0, "erase").json() == {"id_slot": 0, "n_erased": held}
        assert cached(http, 0) == 0
        again = ask(http, PROMPT, 0)
    assert held > 0 and again["timings"]["cache_n"] == 0
    assert bits(first) == bits(again)


@pytest.mark.timeout(120)
def test_a_busy_slot_is_waited_for(tmp_path: Path):
    """Its save comes after the answer, and holds that answer's prompt."""
    path = with_words(decoder_file("llama", "Q4_K")).write(tmp_path / "tiny.gguf")
    with serve(path, "--slot-save-path", str(tmp_path)) as server:
        url = server.ready()
        with client(url) as http, client(url) as other:
            body = {"prompt": PROMPT, "n_predict": 300, "ignore_eos": True, "stream": True,
                    "id_slot": 0}  # fmt: skip
            with http.stream("POST", "/completion", json=body) as answer:
                lines = answer.iter_lines()
                next(lines)
                saved = act(other, 0, "save", "later").raise_for_status().json()
                rest = list(lines)
    assert saved["n_saved"] == len(PROMPT)
    assert any('"stop":true' in line for line in rest)


@pytest.mark.timeout(120)
def test_a_run_with_files_runs_again_on_the_model(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Without the files: what was brought is computed, with the same bits."""
    saves, trace = tmp_path / "saves", tmp_path / "run.jsonl"
    saves.mkdir()
    flags = ("--slot-save-path", str(saves), "--trace", str(trace), "--trace-content", "ids")
    with serve(model, *flags) as server:
        with client(server.ready()) as http:
            ask(http, PROMPT, 0)
            for action in ("save", "erase"):
                act(http, 0, action, "a").raise_for_status()
            ask(http, [9, *PROMPT[:60]], 0)
            act(http, 1, "restore", "a").raise_for_status()
            warm = ask(http, LONGER, 1)
        server.signal(signal.SIGTERM)
        assert server.end() == 0
    (saves / "a").unlink()
    assert warm["timings"]["cache_n"] == len(PROMPT)
    assert main(["replay", str(trace), "--engine", "-m", str(model), "-t", "1"]) == 0
    assert "tokens equal" in capsys.readouterr().out


def test_there_must_be_a_directory_and_a_model(tmp_path: Path):
    for arguments, why in (
        ((*SIM, "--slot-save-path", str(tmp_path)), "goes with a model"),
        (("-m", "x.gguf", "--slot-save-path", str(tmp_path / "none")), "make it first"),
    ):
        with ServeProcess(*arguments) as server:
            assert server.end() != 0
            assert why in " ".join(server.other)
