"""Goal: a server comes up, answers, and ends as it should, whatever happens to it.

Method: whole processes on the sim engine and on a tiny model, over real sockets; each step waits
for a line of the log or for bytes, never for time to pass.
"""

import json
import os
import signal
import socket
import sys
from pathlib import Path

import httpx
import pytest
from serve_process import SIM, ServeProcess, client
from synthetic import VOCABULARY, decoder_file

from phaseloop.cli.main import main

ENDLESS = {"prompt": "Once", "n_predict": -1, "stream": True, "ignore_eos": True}
FAST = (*SIM, "--sim-speed", "0")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """A model of random weights that knows printable ASCII, and nothing to say in it."""
    file = decoder_file("llama", seed=4)
    characters = [chr(code) for code in range(0x21, 0x7F)] + ["\u0120", "\u010a"]
    tokens = [*characters, "<|end|>"]
    tokens += [f"<unused{index}>" for index in range(VOCABULARY - len(tokens))]
    file.root |= {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.eos_token_id": len(characters),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * len(characters) + [3] + [5] * (VOCABULARY - 97),
        "tokenizer.ggml.merges": ["a b"],
    }
    return file.write(tmp_path_factory.mktemp("serve") / "tiny.gguf")


# --- answering ------------------------------------------------------------------------------------


def test_a_server_answers_and_leaves_a_trace_that_replays(tmp_path):
    trace = tmp_path / "run.jsonl"
    with ServeProcess(*FAST, "--trace", str(trace)) as server:
        with client(server.ready()) as http:
            assert http.get("/health").json() == {"status": "ok"}
            body = {"messages": [{"role": "user", "content": "Hello"}], "seed": 1}
            answer = http.post("/v1/chat/completions", json=body).json()
            again = http.post("/v1/chat/completions", json=body).json()
        text = answer["choices"][0]["message"]["content"]
        assert text.strip().endswith(".") and answer["choices"][0]["finish_reason"] == "stop"
        assert again["choices"][0]["message"]["content"] == text
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        server.signal(signal.SIGTERM)
        assert server.end() == 0
    last = json.loads(trace.read_text().splitlines()[-1])
    assert (last["line"], last["reason"], last["exit_code"]) == ("footer", "shutdown", 0)
    assert main(["replay", str(trace)]) == 0


def test_each_request_has_two_lines_in_the_log():
    with ServeProcess(*FAST) as server:
        with client(server.ready()) as http:
            http.post("/completion", json={"prompt": "abc", "n_predict": 5})
        began = server.until("request")
        assert (began["id"], began["prompt"], began["limit"]) == (0, 3, 5)
        ended = server.until("answer")
        assert (ended["id"], ended["slot"], ended["reason"]) == (0, ended["slot"], "length")
        assert (ended["prompt"], ended["cached"], ended["generated"]) == (3, 0, 5)
        spans = [ended[f"{span}_ms"] for span in ("queue", "prefill", "barrier", "decode")]
        assert all(span >= 0 for span in spans)


def test_a_model_is_served_from_its_file(tiny):
    with ServeProcess("-m", str(tiny), "-c", "512", "-np", "2", "-t", "1") as server:
        url = server.ready()
        ready = server.lines[-1]
        assert (ready["slots"], ready["context"], ready["kv_tokens"]) == (2, 512, 512)
        assert "weights" in next(line["plan"] for line in server.lines if line["event"] == "memory")
        with client(url) as http:
            body = {"prompt": "ab", "n_predict": 8, "temperature": 0, "ignore_eos": True}
            first, second = (http.post("/completion", json=body).json() for _ in range(2))
            model = http.get("/v1/models").json()["data"][0]
        assert (first["tokens_predicted"], first["tokens_evaluated"]) == (8, 2)
        assert first["content"] == second["content"]
        assert (model["id"], model["meta"]["n_ctx_train"]) == ("tiny.gguf", 512)
        server.signal(signal.SIGINT)
        assert server.end() == 0


def test_settings_reach_the_answers():
    flags = ("-n", "3", "-a", "name", "--api-key", "k", "--api-prefix", "/x", "--no-slots")
    with (
        ServeProcess(*FAST, *flags) as server,
        client(server.ready().removesuffix("/x")) as http,
    ):
        assert http.get("/x/health").status_code == 200
        assert http.get("/x/props").status_code == 401
        http.headers["X-Api-Key"] = "k"
        assert http.get("/health").status_code == 404
        answer = http.post("/x/completion", json={"prompt": "abc"}).json()
        assert (answer["tokens_predicted"], answer["model"]) == (3, "name")
        assert http.get("/x/slots").status_code == 501


# --- loading --------------------------------------------------------------------------------------


@pytest.fixture
def gate(tmp_path) -> Path:
    """Loading reads a template from it, and waits until somebody writes one."""
    path = tmp_path / "template"
    os.mkfifo(path)
    return path


def test_while_loading_everybody_is_told_so(gate):
    with (
        ServeProcess(*FAST, "--chat-template-file", str(gate)) as server,
        client(server.url()) as http,
    ):
        answer = http.get("/health")
        assert answer.status_code == 503
        assert answer.json()["error"] == {
            "code": 503,
            "message": "Loading model",
            "type": "unavailable_error",
        }
        gate.write_text("{{ messages[0].content }}")
        server.until("ready")
        assert http.get("/health").status_code == 200
        body = {"messages": [{"role": "user", "content": "as it is"}]}
        assert http.post("/apply-template", json=body).json() == {"prompt": "as it is"}


@pytest.mark.parametrize("number, exit_code", [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_loading_can_be_given_up(gate, number, exit_code):
    with ServeProcess(*FAST, "--chat-template-file", str(gate)) as server:
        with client(server.url()) as http:
            assert http.get("/health").status_code == 503  # the handlers are there
        server.signal(number)
        assert server.end() == exit_code


def test_a_broken_model_ends_the_server(tiny, tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(tiny.read_bytes()[:2000])
    with ServeProcess("-m", str(broken)) as server:
        assert server.end() == 2
    assert len(server.other) == 1
    assert server.other[0].startswith(f"phaseloop: {broken}: ")
    assert "download it again" in server.other[0]


def test_a_context_beyond_memory_is_refused_with_one_that_fits(tiny):
    with ServeProcess("-m", str(tiny), "-c", str(1 << 26)) as server:
        code = server.end()
    if code != 2:
        pytest.skip("this machine has memory for everything")
    assert "does not fit" in server.other[0] and "would fit" in server.other[0]


def test_without_ggml_the_remedy_is_named(tiny):
    blocked = "import sys; sys.modules['ggml'] = None; from phaseloop.cli.main import main; "
    program = (sys.executable, "-c", f"{blocked}sys.exit(main())")
    with ServeProcess("-m", str(tiny), program=program) as server:
        assert server.end() == 2
    assert "pip install 'phaseloop[cpu]'" in server.other[0]


# --- ending ---------------------------------------------------------------------------------------


def test_newcomers_are_refused_at_the_first_signal_and_streams_end_at_the_second():
    with ServeProcess(*SIM, "--shutdown-grace-s", "3600") as server:
        with (
            client(server.ready()) as http,
            http.stream("POST", "/completion", json=ENDLESS) as answer,
        ):
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            server.signal(signal.SIGTERM)
            server.until("shutting down")
            with client(str(http.base_url)) as other:
                assert other.post("/completion", json={"prompt": "late"}).status_code == 503
            server.signal(signal.SIGTERM)  # in the place of an hour
            events = [line for line in lines if line]
        last = json.loads(events[-1].removeprefix("data: "))
        assert last["error"]["code"] == 503
        assert server.end() == 0


def test_answers_under_way_have_their_grace():
    with ServeProcess(*SIM, "--sim-speed", "50", "--shutdown-grace-s", "60") as server:
        body = ENDLESS | {"n_predict": 200}
        with (
            client(server.ready()) as http,
            http.stream("POST", "/completion", json=body) as answer,
        ):
            lines = answer.iter_lines()
            next(lines)
            server.signal(signal.SIGTERM)
            last = [line for line in lines if line][-1]
        assert json.loads(last.removeprefix("data: "))["tokens_predicted"] == 200
        assert server.end() == 0


def test_when_the_grace_is_over_streams_end():
    with (
        ServeProcess(*SIM, "--shutdown-grace-s", "0.05") as server,
        client(server.ready()) as http,
        http.stream("POST", "/completion", json=ENDLESS) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        server.signal(signal.SIGTERM)
        assert "shutting down" in [line for line in lines if line][-1]
        assert server.end() == 0


DYING = """
import sys
from phaseloop.cli.main import main
from phaseloop.engine.protocol import EngineDied
from phaseloop.engine.sim_live import LiveSimEngine

def die(self, launch):
    raise EngineDied("the device is gone")

LiveSimEngine.run = die
sys.exit(main())
"""


def test_a_lost_engine_ends_the_server_with_70(tmp_path):
    trace = tmp_path / "lost.jsonl"
    program = (sys.executable, "-c", DYING)
    with ServeProcess(*FAST, "--trace", str(trace), program=program) as server:
        with client(server.ready()) as http:
            answer = http.post("/completion", json={"prompt": "abc"})
        assert answer.status_code in (500, 503)
        assert server.end() == 70
    assert json.loads(trace.read_text().splitlines()[-1])["reason"] == "engine_lost"


# --- the trace and the disk -----------------------------------------------------------------------


def test_an_earlier_trace_is_kept(tmp_path):
    trace = tmp_path / "run.jsonl"
    for _ in range(3):
        with ServeProcess(*FAST, "--trace", str(trace)) as server:
            server.ready()
            server.signal(signal.SIGTERM)
            assert server.end() == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "run.1.jsonl",
        "run.2.jsonl",
        "run.jsonl",
    ]


def test_a_file_that_is_no_trace_is_left_alone(tmp_path):
    notes = tmp_path / "notes"
    notes.write_text("important")
    with ServeProcess(*FAST, "--trace", str(notes)) as server:
        assert server.end() == 2
    assert "is no trace" in server.other[0]
    assert notes.read_text() == "important"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_serving_goes_on_when_the_disk_is_full():
    with ServeProcess(*FAST, "--trace", "/dev/full") as server:
        with client(server.ready()) as http:
            for _ in range(2):
                assert http.post("/completion", json={"prompt": "abc"}).status_code == 200
        server.signal(signal.SIGTERM)
        assert server.end() == 0
    lost = [line for line in server.lines if line["event"].startswith("the trace ends here")]
    assert [line["reason"] for line in lost] == ["No space left on device"]


# --- the socket -----------------------------------------------------------------------------------


def test_a_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with ServeProcess(*FAST, "--port", str(port)) as server:
            assert server.end() == 2
    assert server.other == [
        f"phaseloop: cannot listen on 127.0.0.1:{port}: Address already in use; the port is taken; "
        "choose another with --port, or end who has it"
    ]


def test_a_unix_socket_serves_and_replaces_what_a_dead_server_left(tmp_path):
    path = tmp_path / "x.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with ServeProcess(*FAST, "--host", str(path)) as server:
        assert server.url() == f"unix:{path}"
        server.until("ready")
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://x") as http:
            assert http.get("/health").status_code == 200
        with ServeProcess(*FAST, "--host", str(path)) as second:
            assert second.end() == 2
        assert "Address already in use" in second.other[0]
        server.signal(signal.SIGTERM)
        assert server.end() == 0
    assert not path.exists()


# --- the supervisor -------------------------------------------------------------------------------


def test_a_supervisor_starts_a_dead_server_again_and_passes_signals_on():
    with ServeProcess(*FAST, "--supervise") as supervisor:
        first = supervisor.until("server started")["pid"]
        supervisor.ready()
        os.kill(first, signal.SIGKILL)
        died = supervisor.until("server died")
        assert (died["pid"], died["cause"]) == (first, "SIGKILL")
        assert supervisor.until("server started")["pid"] != first
        with client(supervisor.ready()) as http:
            assert http.get("/health").status_code == 200
        supervisor.signal(signal.SIGTERM)
        assert supervisor.end() == 0


def test_a_supervisor_does_not_repeat_a_mistake_of_the_command_line():
    with ServeProcess("--sim", "nope", "--supervise") as supervisor:
        assert supervisor.end() == 2
    assert [line["event"] for line in supervisor.lines].count("server started") == 1
