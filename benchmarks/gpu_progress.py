"""One line on the terminal that says how far a check is; nothing where nobody looks."""

import sys
import time
from types import TracebackType
from typing import Self, TextIO

WIDTH = 30
EVERY_S = 0.1


class Progress:
    """`with Progress("what", count) as bar: bar.step("which")`."""

    def __init__(self, what: str, count: int, stream: TextIO = sys.stderr) -> None:
        self._what, self._count, self._stream = what, count, stream
        self._done, self._shown_s = 0, -EVERY_S

    def __enter__(self) -> Self:
        self._show("")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._stream.isatty():
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def expect(self, count: int) -> None:
        self._count = count

    def step(self, which: str) -> None:
        self._done += 1
        self._show(which)

    def _show(self, which: str) -> None:
        now_s = time.monotonic()
        if not self._stream.isatty() or now_s < self._shown_s + EVERY_S:
            return
        self._shown_s = now_s
        full = WIDTH * min(self._done, self._count) // max(1, self._count)
        bar = "#" * full + "." * (WIDTH - full)
        line = f"{self._what} [{bar}] {self._done}/{self._count} {which}"
        self._stream.write(f"\r\x1b[K{line[:100]}")
        self._stream.flush()
