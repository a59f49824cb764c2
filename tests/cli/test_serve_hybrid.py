"""Goal: a hybrid is served as any model is, and what it cannot do is said at the start.

Method: a tiny file with a tokenizer, a server in a process of its own, and its answers.
"""

import pytest

pytest.importorskip("gguf")
pytest.importorskip("ggml")

from hybrid_files import hybrid_file, with_words
from serve_process import ServeProcess, client

from phaseloop.engine.reuse import END_MARGIN

CONTEXT = 256


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    file = with_words(hybrid_file("Q4_K", draft=True))
    return file.write(tmp_path_factory.mktemp("served") / "tiny.gguf")


def ask(http, prompt, limit):
    body = {"prompt": prompt, "n_predict": limit, "temperature": 0, "ignore_eos": True}
    return http.post("/completion", json=body).raise_for_status().json()


def test_a_hybrid_is_served(path):
    prompt = [index % 100 for index in range(90)]
    arguments = ("-m", str(path), "-c", str(CONTEXT), "-np", "2", "-t", "1", "--context-shift")
    with ServeProcess(*arguments) as server:
        url = server.ready()
        with client(url) as http:
            first = ask(http, prompt, 6)
            again = ask(http, prompt, 6)
            longer = ask(http, [*prompt, 5, 6, 7], 6)
            endless = ask(http, prompt, -1)
    assert [answer["timings"]["cache_n"] for answer in (first, again, longer)] == [
        0,
        len(prompt) - END_MARGIN,
        len(prompt),
    ]
    assert first["content"] == again["content"] and first["tokens_predicted"] == 6
    assert endless["stop_type"] == "limit" and endless["truncated"]
    assert endless["tokens_predicted"] + len(prompt) in (CONTEXT, CONTEXT + 1)
    events = {line["event"]: line for line in server.lines}
    assert "nothing can be dropped" in events["no context shift"]["why"]
    assert "recurrent states" in events["memory"]["plan"]
