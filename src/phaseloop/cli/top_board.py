"""What `phaseloop top` knows: the present of every slot, and a little of the past."""

import time
from collections import deque
from collections.abc import Callable, Iterator

from msgspec import Struct

from phaseloop.runtime.timeline import Batch, End, Figures, Head, Line, Look, Stretch, Turn

PAST_NS = 30_000_000_000  # of the strips
RATE_NS = 2_000_000_000  # over which rates are taken
SAMPLE_NS = 1_000_000_000
SAMPLES = 60


class Rates(Struct, frozen=True):
    """Tokens per second."""

    prompt: float
    generated: float


class Board:
    """Give it batches in order.  Memory is bounded by the past that is shown."""

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.head: Head | None = None
        self.now_ns = 0
        self.turn: Turn | None = None
        self.line: Line | None = None
        self.figures: Figures | None = None
        self.samples: deque[Rates] = deque(maxlen=SAMPLES)  # one a second
        self.ends: dict[str, int] = {}
        self._pasts: list[deque[Stretch]] = []
        self._began_ns = 0
        self._figures: deque[Figures] = deque()
        self._sampled_ns = 0
        self._clock_ns = clock_ns
        self._drawn_ns = 0

    def take(self, batch: Batch) -> None:
        if batch.head is not None:
            self._begin(batch.head, batch.now_ns)
        for record in batch.records:
            match record:
                case Stretch():
                    self._pasts[record.slot].append(record)
                case Turn():
                    self.turn = record
                case Line():
                    self.line = record
                case Figures():
                    self.figures = record
                    self._figures.append(record)
                case End():
                    self.ends[record.reason] = self.ends.get(record.reason, 0) + 1
        self.now_ns = batch.now_ns
        self._forget()
        if self.now_ns - self._sampled_ns >= SAMPLE_NS and (rates := self.rates()) is not None:
            self._sampled_ns = self.now_ns
            self.samples.append(rates)

    def is_due(self, frames_per_s: int) -> bool:
        """Whether it is time to draw again; the caller then does."""
        now_ns = self._clock_ns()
        if now_ns - self._drawn_ns < 1e9 / frames_per_s:
            return False
        self._drawn_ns = now_ns
        return True

    def present(self, slot: int) -> Stretch:
        return self._pasts[slot][-1]

    def since_ns(self, stretch: Stretch) -> tuple[int, bool]:
        """How long it has been so; whether it began before anybody looked."""
        return self.now_ns - stretch.at_ns, stretch.at_ns <= self._began_ns

    def looks(self, slot: int, count: int) -> Iterator[Look | None]:
        """`count` moments up to now: how the slot looked at the middle of each, None if unknown."""
        past = self._pasts[slot]
        stretches = iter(past)
        now, after = None, next(stretches, None)
        for moment in range(count):
            at_ns = self.now_ns - PAST_NS + PAST_NS * (2 * moment + 1) // (2 * count)
            while after is not None and after.at_ns <= at_ns:
                now, after = after, next(stretches, None)
            yield None if now is None else now.look

    def rates(self) -> Rates | None:
        """Over the last moments; None before there were any."""
        if self.figures is None or self.now_ns - self._began_ns < SAMPLE_NS:
            return None
        from_ns = max(self.now_ns - RATE_NS, self._began_ns)
        before = self._figures[0]
        for figures in self._figures:
            if figures.at_ns > from_ns:
                break
            before = figures
        span_s = (self.now_ns - from_ns) / 1e9
        return Rates(
            (self.figures.prompt_tokens - before.prompt_tokens) / span_s,
            (self.figures.generated_tokens - before.generated_tokens) / span_s,
        )

    def seated(self) -> int:
        return sum(past[-1].look != "idle" for past in self._pasts)

    def _begin(self, head: Head, now_ns: int) -> None:
        """Anew, after a gap as after another start: tokens are counted from here."""
        self.head = head
        self._began_ns = self._sampled_ns = now_ns
        self._pasts = [deque[Stretch]() for _ in range(head.slot_count)]
        self._figures.clear()

    def _forget(self) -> None:
        for past in self._pasts:
            while len(past) > 1 and past[1].at_ns < self.now_ns - PAST_NS:
                past.popleft()
        while len(self._figures) > 1 and self._figures[1].at_ns < self.now_ns - RATE_NS:
            self._figures.popleft()
