"""phaseloop's own engine under measurement: as rounds, and the forward pass by itself."""

from random import Random

from phaseloop.core.vocabulary import Lane, LaunchRound, Produced, RoundKind, SeatRequest
from phaseloop.engine.cpu import ModelEngine
from phaseloop.engine.protocol import Content
from phaseloop.ops.ggml import AttentionPath, GgmlBackend
from phaseloop.ops.interface import Span

from .bench_engine_rows import CLOCKS, DECODE_ROUNDS, Clock, Rejected, Row, Sample

SUFFIXES: dict[AttentionPath, str] = {"tiled": "", "fast": " fast", "rows": " by rows"}


class Prompts:
    """Prompts of tokens drawn at random, the same ones in every run."""

    def __init__(self, vocabulary: int) -> None:
        self._random = Random(0)
        self._vocabulary = vocabulary

    def draw(self, length: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(self._vocabulary) for _ in range(length))


class RoundsRunner:
    """Engine.run as the scheduler calls it: seats, rounds of lanes, and the sampler, greedy."""

    def __init__(
        self, engine: ModelEngine, attention: AttentionPath, clock: Clock, prompts: Prompts
    ) -> None:
        """No token may end a text for the engine, or some streams would stop before the others."""
        described = engine.describe()
        self.name = f"engine{SUFFIXES[attention]}"
        self.backend = described.name
        self._now_ns = CLOCKS[clock]
        self._prompts = prompts
        self._batch_tokens = described.batch_tokens
        self._engine = engine
        self._rounds = 0

    def serves(self, row: Row) -> bool:
        return True

    def measure(self, row: Row) -> Sample:
        slots = 1 if row.kind == "prefill" else row.size
        length = row.size if row.kind == "prefill" else 1
        for slot in range(slots):
            seat = SeatRequest(slot, 0, slot, None, "oldest")
            self._engine.seat(seat, Content(self._prompts.draw(length), reuse=False))
        try:
            return self._prefill(length) if row.kind == "prefill" else self._decode(slots)
        finally:
            for slot in range(slots):
                self._engine.release(slot, 0, 0)

    def close(self) -> None:
        """The backend is closed by whoever made it."""

    def _prefill(self, length: int) -> Sample:
        start_ns = self._now_ns()
        for start in range(0, length, self._batch_tokens):
            self._run("prefill", 1, start, min(self._batch_tokens, length - start), 0)
        return Sample(length, (self._now_ns() - start_ns) / 1e9)

    def _decode(self, slots: int) -> Sample:
        self._run("prefill", slots, 0, 1, 0)
        self._run("sample", slots, 1, 0, 1)
        start_ns = self._now_ns()
        for position in range(1, DECODE_ROUNDS + 1):
            self._run("decode", slots, position, 1, 1)
        return Sample(slots * DECODE_ROUNDS, (self._now_ns() - start_ns) / 1e9)

    def _run(self, kind: RoundKind, slots: int, start: int, count: int, outputs: int) -> None:
        lanes = tuple(Lane(slot, slot, 0, start, count, outputs) for slot in range(slots))
        self._rounds += 1
        outcome = self._engine.run(LaunchRound(self._rounds, kind, lanes, "cohort_sealed"))
        wanted = Produced(outputs)
        for result in outcome.results:
            if result != wanted:
                raise Rejected(f"a {kind} lane gave {result}, not {wanted}")


class PassRunner:
    """The forward pass alone: no slots, no sampler."""

    def __init__(
        self, backend: GgmlBackend, attention: AttentionPath, clock: Clock, prompts: Prompts
    ) -> None:
        self.name = f"pass{SUFFIXES[attention]}"
        self._now_ns = CLOCKS[clock]
        self._prompts = prompts
        self._backend = backend

    def serves(self, row: Row) -> bool:
        return True

    def measure(self, row: Row) -> Sample:
        regions = 1 if row.kind == "prefill" else row.size
        tokens = [self._prompts.draw(max(DECODE_ROUNDS, row.size)) for _ in range(regions)]
        start_ns = self._now_ns()
        if row.kind == "prefill":
            self._forward([Span(0, 0, tokens[0][: row.size], 1, False)])
        else:
            for position in range(DECODE_ROUNDS):
                self._forward(
                    [Span(n, position, (tokens[n][position],), 1, True) for n in range(regions)]
                )
        end_ns = self._now_ns()
        for region in range(regions):
            self._backend.truncate(region, 0)
        count = row.size if row.kind == "prefill" else regions * DECODE_ROUNDS
        return Sample(count, (end_ns - start_ns) / 1e9)

    def close(self) -> None:
        """The backend is closed by whoever made it."""

    def _forward(self, spans: list[Span]) -> None:
        rows = self._backend.forward(spans)
        if len(rows) != len(spans):
            raise Rejected(f"the pass gave {len(rows)} rows of logits, not {len(spans)}")
