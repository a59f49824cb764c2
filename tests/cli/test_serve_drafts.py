"""Goal: a server that drafts gives the answers of one that does not, in fewer rounds, and says so.

Method: tiny models whose vocabulary is the letters, servers in processes of their own.  A model
that drafts for itself is always right, so every draft must be accepted; n-grams guess what they
have seen.  What a trace holds of it is run again.
"""

import json
import re
import signal

import pytest

pytest.importorskip("gguf")
pytest.importorskip("ggml")

from letters import letters_file
from replay_runs import Ran
from serve_process import ServeProcess, client

BASE = {"prompt": "what " * 20, "n_predict": 24, "ignore_eos": True}
REQUESTS = (
    BASE | {"temperature": 0.0},
    BASE | {"temperature": 1.0, "seed": 3},
    BASE | {"temperature": 1.2, "seed": 4, "repeat_penalty": 1.2, "dry_multiplier": 0.5},
    BASE | {"temperature": 1.0, "seed": 5, "n_probs": 2, "prompt": "so " * 9},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("drafts")


@pytest.fixture(scope="module")
def model(folder):
    return letters_file(folder / "letters.gguf")


def flags(model, *more):
    return ("-m", str(model), "-c", "1024", "-np", "2", "-t", "1", "--metrics", *map(str, more))


def ask(http, **body):
    answer = http.post("/completion", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def shown(answer):
    """What a client sees of an answer but for its times."""
    names = ("content", "stop_type", "stopping_word", "tokens_predicted", "truncated", "tokens")
    likely = answer.get("completion_probabilities")
    return [answer[name] for name in names], likely


def requests(first):
    """As above, and some that end where the first one's text has a few letters."""
    text = first["content"]
    return (
        *REQUESTS,
        *(REQUESTS[0] | {"stop": [text[at : at + 2]]} for at in (3, 6, 11)),
        *(REQUESTS[1] | {"n_predict": limit} for limit in (1, 2, 5, 7)),
    )


@pytest.fixture(scope="module")
def plain(model):
    """The answers of a server without drafts."""
    with ServeProcess(*flags(model)) as server, client(server.ready()) as http:
        first = ask(http, **REQUESTS[0])
        assert "draft_n" not in first["timings"]
        asked = requests(first)
        answers = [ask(http, **body) for body in asked]
        assert http.get("/slots").json()[0]["speculative"] is False
    assert {answer["stop_type"] for answer in answers} == {"limit", "word"}
    return asked, answers


def test_a_model_that_drafts_for_itself(model, plain, tmp_path, capsys):
    trace = tmp_path / "run.jsonl"
    drafts = ("-md", model, "--draft-max", "5", "--draft-cost", "0", "--policy", "quantum")
    record = ("--trace", trace, "--trace-content", "ids")
    asked, expected = plain
    with ServeProcess(*flags(model, *drafts, *record)) as server:
        with client(server.ready()) as http:
            answers = [ask(http, **body) for body in asked]
            streamed = text_of(http, asked[0])
            none = ask(http, **asked[1], **{"speculative.n_max": 0})
            few = ask(http, **asked[1], **{"speculative.n_max": 1})
            wrong = http.post("/completion", json=asked[1] | {"speculative.n_max": -1})
            metrics = http.get("/metrics").text
            slots = http.get("/slots").json()
            settings = http.get("/props").json()["default_generation_settings"]["params"]
        server.signal(signal.SIGTERM)
        assert server.end() == 0
    assert [shown(answer) for answer in answers] == [shown(answer) for answer in expected]
    assert streamed == expected[0]["content"]
    for body, answer in zip(asked, answers, strict=True):
        made = answer["timings"]
        if body["n_predict"] > 5 and "stop" not in body:
            assert made["draft_n"] == made["draft_n_accepted"] > 0
    assert shown(none) == shown(few) == shown(expected[1])
    assert "draft_n" not in none["timings"] and few["timings"]["draft_n"] == 11
    assert wrong.status_code == 400 and "speculative.n_max" in wrong.text
    assert slots[0]["speculative"] is True
    assert settings["speculative.types"] == "draft-simple"
    assert 'spec_decode_num_accepted_tokens_per_pos_total{position="0"}' in metrics
    found = Ran(capsys, "--engine", "-m", model, trace, "-t", 1, "--json")
    assert (found.code, found.object()["differences"]) == (0, [])
    rounds = [json.loads(line).get("event", {}) for line in trace.read_text().splitlines()]
    widths = [event["drafted"] for event in rounds if "drafted" in event]
    assert any(width > 1 for lanes in widths for width in lanes)


def text_of(http, body):
    """The content of a stream, put together."""
    with http.stream("POST", "/completion", json=body | {"stream": True}) as answer:
        events = [line[6:] for line in answer.iter_lines() if line.startswith("data: {")]
    return "".join(json.loads(event)["content"] for event in events)


def test_n_grams_and_a_coarser_model(model, folder, plain):
    """Both at once: what the text has not said before, the model guesses."""
    coarse = letters_file(folder / "coarse.gguf", "Q4_0")
    asked, expected = plain
    kinds = ("--spec-type", "ngram-simple,draft-simple", "-md", coarse)
    with ServeProcess(
        *flags(model, *kinds, "--spec-ngram-simple-size-n", 1, "--draft-cost", 0)
    ) as server:
        with client(server.ready()) as http:
            answers = [ask(http, **body) for body in asked]
            metrics = http.get("/metrics").text
            settings = http.get("/props").json()["default_generation_settings"]["params"]
        told = {line["event"]: line for line in server.lines}
    assert "draft model" in told["memory"]["plan"]
    assert told["drafts"]["by"] == "ngram-simple,draft-simple"
    assert (told["drafts"]["most"], told["drafts"]["cost"]) == (48, 0)
    assert [shown(answer) for answer in answers] == [shown(answer) for answer in expected]
    drafted = sum(answer["timings"].get("draft_n", 0) for answer in answers)
    accepted = sum(answer["timings"].get("draft_n_accepted", 0) for answer in answers)
    assert 0 < accepted < drafted
    # A round that was in flight when a stop string ended its request is counted as well.
    assert drafted <= counted(metrics, "draft") <= drafted + 3 * 48
    assert accepted <= counted(metrics, "accepted") <= accepted + 3 * 48
    assert settings["speculative.types"] == "ngram-simple,draft-simple"


def counted(metrics, what):
    (found,) = re.findall(rf"^llamacpp:spec_decode_num_{what}_tokens_total (\d+)$", metrics, re.M)
    return int(found)


def test_a_draft_model_of_another_vocabulary_is_refused_by_what_differs(model, folder):
    other = letters_file(folder / "other.gguf", first=0x22)
    with ServeProcess(*flags(model, "-md", other)) as server:
        assert server.end() == 2
    said = " ".join([*server.other, *(json.dumps(line) for line in server.lines)])
    assert "cannot draft for this model" in said and "token 5 is '&' to the model" in said
    assert "Traceback" not in said


def test_a_draft_model_that_is_not_there_is_named(model):
    with ServeProcess(*flags(model, "-md", "nowhere.gguf")) as server:
        assert server.end() != 0
    said = " ".join([*server.other, *(json.dumps(line) for line in server.lines)])
    assert "nowhere.gguf" in said and "Traceback" not in said
