"""llama.cpp's programs under measurement: llama-bench, and llama-server over HTTP.

They are whatever the user names; nothing of llama.cpp is part of phaseloop.  A program is a command
line, so that it may carry options of its own: `llama-bench=build/bin/llama-bench --repack 0`.
"""

import ctypes
import shlex
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import msgspec
from msgspec import Struct

from .bench_engine_own import Prompts
from .bench_engine_rows import DECODE_ROUNDS, Clock, Rejected, Row, Sample
from .errors import UserError

RUN_S_MAX = 1800
START_S_MAX = 120
HEALTH_INTERVAL_S = 0.05
LOG_BYTES_SHOWN = 2000


class Program(Struct, frozen=True):
    """A command line, and the name it goes by in tables."""

    name: str
    words: tuple[str, ...]

    @property
    def shown(self) -> str:
        """The command without where it lies on this machine."""
        return shlex.join([Path(self.words[0]).name, *self.words[1:]])


def find_program(name: str, command: str) -> Program:
    """Raises UserError where there is nothing to run."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UserError(f"--against {name}={command}: {error}") from None
    found = shutil.which(words[0]) if words else None
    if found is None:
        raise UserError(
            f"--against {name}={command}: no program is there; build llama.cpp and name its {name}"
        )
    return Program(name, (found, *words[1:]))


class BenchEntry(Struct, frozen=True):
    """What llama-bench prints of one test, as far as it is read here."""

    n_prompt: int
    n_gen: int
    avg_ts: float
    build_commit: str = ""
    build_number: int = 0


class BenchRunner:
    """One run of llama-bench per sample, after the warm-up that it makes itself."""

    def __init__(self, program: Program, model: Path, threads: int) -> None:
        self.name = program.name
        self.build = ""
        self._command = [*program.words, "-m", str(model), "-t", str(threads)]
        self._command += ["-r", "1", "-o", "json"]

    def serves(self, row: Row) -> bool:
        return row.kind == "prefill" or row.size == 1

    def measure(self, row: Row) -> Sample:
        prompt, generated = (row.size, 0) if row.kind == "prefill" else (0, DECODE_ROUNDS)
        command = [*self._command, "-p", str(prompt), "-n", str(generated)]
        try:
            ran = subprocess.run(command, capture_output=True, timeout=RUN_S_MAX, check=False)
        except subprocess.TimeoutExpired:
            raise UserError(f"{self.name} ran for more than {RUN_S_MAX} s") from None
        except OSError as error:
            raise UserError(f"{self.name} cannot be run: {error.strerror or error}") from None
        if ran.returncode != 0:
            raise UserError(f"{self.name} {ending(ran.returncode, ran.stderr)}")
        try:
            entries = msgspec.json.decode(ran.stdout, type=list[BenchEntry])
        except msgspec.MsgspecError as error:
            raise UserError(f"{self.name} printed no results that can be read: {error}") from None
        return self._sample(entries, prompt, generated)

    def close(self) -> None:
        """Every run has ended."""

    def _sample(self, entries: Sequence[BenchEntry], prompt: int, generated: int) -> Sample:
        if len(entries) != 1:
            raise Rejected(f"{len(entries)} results, not one")
        (entry,) = entries
        if (entry.n_prompt, entry.n_gen) != (prompt, generated) or entry.avg_ts <= 0:
            raise Rejected(
                f"{entry.n_prompt} + {entry.n_gen} tokens at {entry.avg_ts} per second, "
                f"not {prompt} + {generated}"
            )
        if entry.build_number:
            self.build = f"build {entry.build_number} ({entry.build_commit})"
        tokens = prompt + generated
        return Sample(tokens, tokens / entry.avg_ts)


class ServerSize(Struct, frozen=True):
    streams: int
    length: int  # tokens of one stream


class Timings(Struct, frozen=True):
    """llama-server's own account of a completion.  Times in milliseconds."""

    prompt_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float  # from the first generated token to the last


class Completion(Struct, frozen=True):
    timings: Timings


class ServerRunner:
    """One llama-server for all samples; the streams of a sample are the prompts of one request."""

    def __init__(
        self,
        program: Program,
        model: Path,
        threads: int,
        size: ServerSize,
        clock: Clock,
        prompts: Prompts,
    ) -> None:
        """Raises UserError if it does not come up."""
        self.name = program.name
        self._clock: Clock = clock
        self._prompts = prompts
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        command = [*program.words, "-m", str(model), "-t", str(threads)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--cache-ram", "0"]
        command += ["-np", str(size.streams), "-c", str(size.streams * size.length)]
        self._log = TemporaryFile()  # noqa: SIM115  # as long as the server lives
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log)
        try:
            self._wait_until_healthy()
        except BaseException:
            self.close()
            raise

    def serves(self, row: Row) -> bool:
        return True

    def measure(self, row: Row) -> Sample:
        count = 1 if row.kind == "prefill" else row.size
        length = row.size if row.kind == "prefill" else 1
        wanted = 1 if row.kind == "prefill" else DECODE_ROUNDS + 1
        prompts = [self._prompts.draw(length) for _ in range(count)]
        body = {
            "prompt": prompts if count > 1 else prompts[0],
            "n_predict": wanted,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": False,
        }
        cpu_before_ns = cpu_ns_of(self._process.pid)
        answer = self._post("/completion", msgspec.json.encode(body))
        cpu_s = (cpu_ns_of(self._process.pid) - cpu_before_ns) / 1e9
        try:
            kind = list[Completion] if count > 1 else Completion
            decoded: Any = msgspec.json.decode(answer, type=kind)
        except msgspec.MsgspecError as error:
            raise Rejected(f"an answer without timings: {error}") from None
        timings = [one.timings for one in (decoded if count > 1 else [decoded])]
        for one in timings:
            if (one.prompt_n, one.predicted_n) != (length, wanted):
                raise Rejected(
                    f"{one.prompt_n} + {one.predicted_n} tokens, not {length} + {wanted}"
                )
        if self._clock == "cpu":  # of the whole request, its one-token prompts included
            return Sample(length if row.kind == "prefill" else count * wanted, cpu_s)
        return prefilled(timings[0]) if row.kind == "prefill" else decoded_by(timings)

    def close(self) -> None:
        self._process.terminate()
        try:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
        finally:  # also where a second Ctrl-C cuts this waiting short
            self._process.kill()
            self._process.wait()
            self._log.close()

    def _wait_until_healthy(self) -> None:
        end_s = time.monotonic() + START_S_MAX
        while time.monotonic() < end_s:
            if self._process.poll() is not None:
                raise self._failure()
            try:
                with urllib.request.urlopen(f"{self._url}/health", timeout=5):
                    return
            except (OSError, HTTPException):  # not listening yet, or loading: 503
                time.sleep(HEALTH_INTERVAL_S)
        raise UserError(f"{self.name} is not ready after {START_S_MAX} s")

    def _post(self, route: str, body: bytes) -> bytes:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url + route, body, headers)
        try:
            with urllib.request.urlopen(request, timeout=RUN_S_MAX) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            text = error.read(300).decode(errors="replace")
            raise UserError(f"{self.name} answered {error.code}: {text}") from None
        except (OSError, HTTPException) as error:
            if self._process.poll() is not None:
                raise self._failure() from None
            raise UserError(f"{self.name} did not answer: {error}") from None

    def _failure(self) -> UserError:
        return UserError(f"{self.name} {ending(self._process.returncode, last_of(self._log))}")


def prefilled(one: Timings) -> Sample:
    return Sample(one.prompt_n, one.prompt_ms / 1e3)


def decoded_by(timings: Sequence[Timings]) -> Sample:
    """The streams' rates, summed: each counts from its first token, so that token does not."""
    tokens = sum(one.predicted_n - 1 for one in timings)
    rate = sum((one.predicted_n - 1) / one.predicted_ms for one in timings) * 1e3
    return Sample(tokens, tokens / rate)


def ending(code: int, log: bytes) -> str:
    """How a program ended that should not have, with the end of what it said."""
    text = log.decode(errors="replace").strip()[-LOG_BYTES_SHOWN:]
    said = "".join(f"\n  {line}" for line in text.splitlines()[-5:])
    if code >= 0:
        return f"ended with exit code {code}{said}"
    name = signal.Signals(-code).name
    if -code == signal.SIGILL:
        name += ": it has instructions that this machine lacks; build it here"
    return f"was ended by {name}{said}"


def last_of(log: IO[bytes]) -> bytes:
    log.seek(0, 2)
    log.seek(max(0, log.tell() - LOG_BYTES_SHOWN))
    return log.read()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def cpu_ns_of(pid: int) -> int:
    """CPU time of a process of ours, all threads."""
    clock = ctypes.c_int()
    find: Callable[..., int] = ctypes.CDLL(None).clock_getcpuclockid
    if find(pid, ctypes.byref(clock)) != 0:
        raise UserError("llama-server has ended")
    return time.clock_gettime_ns(clock.value)
