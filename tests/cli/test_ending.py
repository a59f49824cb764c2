"""Goal: a command that is told to end leaves nobody behind whom it has started, and says so.

Method: commands in processes of their own, which tell by their output, or whose children tell by a
fifo, that they are under way; then a signal, and what /proc knows of their children afterwards.
"""

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from phaseloop.cli.ending import interrupted_code
from phaseloop.cli.ending_async import run_async

SIM = ("--sim", "cpu-smollm2")
TIMEOUT_S = 50
WORK = "[[request]]\nprompt = 8\nlimit = 2\n"
# `phaseloop` that prints the processes it starts, once they are under way.
PROGRAM = """
import sys
from phaseloop.cli import bench_policies, child
from phaseloop.sim import explore_jobs

def told(word, value):
    sys.stderr.write(f"{word} {value}\\n")
    sys.stderr.flush()

enter, run_once, spawn = child.ChildServer.__aenter__, bench_policies.run_once, explore_jobs.spawn

async def entered(self):
    await enter(self)
    told("started", self.pid)
    return self

async def ran(*arguments):
    run = await run_once(*arguments)
    told("ran", arguments[0].name)
    return run

def spawned(job):
    connection, process = spawn(job)
    told("started", process.pid)
    return connection, process

child.ChildServer.__aenter__, bench_policies.run_once, explore_jobs.spawn = entered, ran, spawned
from phaseloop.cli.main import main
if __name__ == "__main__":
    sys.exit(main())
"""
# In llama.cpp's place: it says who it is, and never answers.
SILENT = """
import os, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
def silent():
    with open({fifo!r}, "w") as out:
        out.write(str(os.getpid()))
    while True:
        time.sleep(60)
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        silent()
if "--port" in sys.argv:
    HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
silent()
"""


class Command:
    """Use it as a context manager: whatever becomes of the test, the process ends."""

    def __init__(self, folder: Path, *arguments: object, before: tuple[str, ...] = ()) -> None:
        program = folder / "program.py"
        program.write_text(PROGRAM)
        line = (*before, sys.executable, program, *map(str, arguments))
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(line, stdout=pipe, stderr=pipe, text=True, cwd=folder)

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def until(self, word: str) -> str:
        """The value that is told with this word next."""
        assert self.process.stderr is not None
        said: list[str] = []
        for line in self.process.stderr:
            said.append(line)
            name, _, value = line.strip().partition(" ")
            if name == word:
                return value
        raise AssertionError(f"ended before {word!r}: {said}")

    def end(self, *numbers: int) -> int:
        """The exit code after these signals, one right after the other."""
        for number in numbers:
            self.process.send_signal(number)
        _, said = self.process.communicate(timeout=TIMEOUT_S)
        assert "Traceback" not in said, said
        return self.process.returncode


def written_to(fifo: Path) -> str:
    """What somebody writes there in one go."""
    place = os.open(fifo, os.O_RDWR)  # opening it for reading alone would wait for the writer
    try:
        readable, _, _ = select.select([place], [], [], TIMEOUT_S)
        assert readable, "nobody has written"
        return os.read(place, 64).decode()
    finally:
        os.close(place)


def is_there(pid: str) -> bool:
    return Path("/proc", pid).exists()


@pytest.fixture
def work(tmp_path):
    path = tmp_path / "work.toml"
    path.write_text(WORK)
    return path


ENDINGS = [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)]


@pytest.mark.parametrize(("number", "code"), ENDINGS)
def test_a_comparison_of_policies_keeps_what_it_has_measured(tmp_path, work, number, code):
    out = tmp_path / "out.json"
    arguments = ("bench", "policies", work, *SIM, "--serve=--sim-speed 0", "--policies", "mixed")
    with Command(tmp_path, *arguments, "--repeats", 10**6, "--json", out) as command:
        server = command.until("started")
        for _ in range(3):  # the warm-up, and two runs of which one at least has been noted
            assert command.until("ran") == "mixed"
        assert is_there(server)
        assert command.end(number) == code
    assert not is_there(server)
    measured = json.loads(out.read_bytes())["measured"]
    assert measured["is_interrupted"] and len(measured["taken"]) >= 1


@pytest.mark.parametrize(("number", "code"), ENDINGS)
def test_a_measured_server_ends(tmp_path, number, code):
    with Command(tmp_path, "bench", "server", "--repeats", 10**6) as command:
        server = command.until("started")
        assert is_there(server)
        assert command.end(number) == code
    assert not is_there(server)


def test_a_signal_that_comes_twice_interrupts_no_ending(tmp_path):
    with Command(tmp_path, "bench", "server", "--repeats", 10**6) as command:
        server = command.until("started")
        assert command.end(signal.SIGTERM, signal.SIGHUP, signal.SIGTERM) in (143, 129)
    assert not is_there(server)


def test_a_hangup_that_is_to_be_ignored_is(tmp_path):
    with Command(tmp_path, "bench", "server", "--repeats", 10**6, before=("nohup",)) as command:
        server = command.until("started")
        assert command.end(signal.SIGHUP, signal.SIGTERM) == 143
    assert not is_there(server)


def test_the_jobs_of_a_check_end(tmp_path):
    bounds = ("--slots", "4", "--requests", "8", "--policy", "mixed,barrier-fair")
    with Command(tmp_path, "check", *bounds, "--jobs", "2") as command:
        workers = [command.until("started") for _ in range(2)]
        assert command.end(signal.SIGTERM) == 143
    assert not any(map(is_there, workers))


def test_a_demo_ends_with_its_server(tmp_path):
    pytest.importorskip("gguf")
    pytest.importorskip("ggml")
    from letters import letters_file

    model = letters_file(tmp_path / "letters.gguf")
    with Command(tmp_path, "demo", "-m", model, "--max-tokens", 10**6) as command:
        server = command.until("started")
        assert command.end(signal.SIGTERM) == 143
    assert not is_there(server)


def test_an_interruption_waits_for_the_end_of_a_callback():
    """Which has looked whether its future is done, and may now complete it."""
    seen: list[bool] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        future = loop.create_future()

        def callback() -> None:
            signal.raise_signal(signal.SIGINT)
            seen.append(future.done())

        loop.call_soon(callback)
        await future

    with pytest.raises(KeyboardInterrupt) as ended:
        run_async(main())
    assert interrupted_code(ended.value) == 130
    assert seen == [False]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("name", ["llama-bench", "llama-server"])
def test_programs_of_others_end(tmp_path, name):
    pytest.importorskip("gguf")
    pytest.importorskip("ggml")
    from synthetic import decoder_file

    model = decoder_file("llama", "Q4_1").write(tmp_path / "tiny.gguf")
    fifo, silent = tmp_path / "fifo", tmp_path / "silent.py"
    os.mkfifo(fifo)
    silent.write_text(SILENT.format(fifo=str(fifo)))
    against = ("--against", f"{name}={sys.executable} {silent}")
    sizes = ("--prefill", "8", "--decode", "", "-t", "1")
    with Command(tmp_path, "bench", "engine", "-m", model, *sizes, *against) as command:
        program = written_to(fifo)
        assert is_there(program)
        assert command.end(signal.SIGTERM) == 143
    assert not is_there(program)
