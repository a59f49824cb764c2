"""What `phaseloop bench engine` measures: rows of its table, and who fills them with samples."""

import time
from collections.abc import Callable
from typing import Literal, Protocol

from msgspec import Struct

Clock = Literal["wall", "cpu"]
CLOCKS: dict[Clock, Callable[[], int]] = {
    "wall": time.perf_counter_ns,
    "cpu": time.process_time_ns,
}
DECODE_ROUNDS = 64


class Row(Struct, frozen=True):
    """prefill: one prompt of `size` tokens.  decode: `size` streams, a token of each per round."""

    kind: Literal["prefill", "decode"]
    size: int

    @property
    def name(self) -> str:
        if self.kind == "prefill":
            return f"prefill {self.size:,} tokens"
        return f"decode {self.size} stream{'s' if self.size > 1 else ''}"


class Sample(Struct, frozen=True):
    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Rejected(Exception):
    """A sample that measured something else than it was to; says what came instead."""


class Runner(Protocol):
    @property
    def name(self) -> str: ...

    def serves(self, row: Row) -> bool:
        """Whether this one can be asked for such a row."""
        ...

    def measure(self, row: Row) -> Sample:
        """Raises Rejected for this sample, UserError where another would not do better."""
        ...

    def close(self) -> None: ...
