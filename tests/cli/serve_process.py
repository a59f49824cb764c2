"""A `phaseloop serve` in a process of its own, told apart by what it logs: nothing here sleeps."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Self

import httpx

PHASELOOP = (sys.executable, "-m", "phaseloop")
SIM = ("--sim", "cpu-smollm2")


class ServeProcess:
    """Use it as a context manager.  `program` is what stands before `serve`."""

    def __init__(self, *arguments: str, program: Sequence[str] = PHASELOOP) -> None:
        line = (*program, "serve", "--port", "0", "--log-json", *arguments)
        clean = {name: value for name, value in os.environ.items() if "LLAMA" not in name}
        self.process = subprocess.Popen(line, stderr=subprocess.PIPE, text=True, env=clean)
        self.lines: list[dict[str, Any]] = []
        self.other: list[str] = []  # what is no log line

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def until(self, event: str, **values: object) -> dict[str, Any]:
        """The next line of that event with these values."""
        assert self.process.stderr is not None
        for text in self.process.stderr:
            try:
                line = json.loads(text)
            except ValueError:
                self.other.append(text.rstrip())
                continue
            self.lines.append(line)
            if line["event"] == event and values.items() <= line.items():
                return line
        raise AssertionError(f"ended before {event!r}: {self.lines} {self.other}")

    def url(self) -> str:
        return self.until("listening")["url"]

    def ready(self) -> str:
        """Its address, once it serves."""
        url = self.url()
        self.until("ready")
        return url

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> int:
        """Read to the end; the exit code."""
        assert self.process.stderr is not None
        for text in self.process.stderr:
            try:
                self.lines.append(json.loads(text))
            except ValueError:
                self.other.append(text.rstrip())
        return self.process.wait()


def client(url: str) -> httpx.Client:
    return httpx.Client(base_url=url, timeout=30, trust_env=False)
