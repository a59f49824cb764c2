"""The sim engine in real time: it computes nothing, but its rounds take as long as they would.

So a server, its page and a benchmark run without a model.  Lengths and prefixes are real: a seat
keeps what its prompt has in common with what the slot held.  Answers are text that a seed chooses,
sentence by sentence; of a request's settings only a logit bias of minus infinity on the end token
means something, which makes the text go on for ever.
"""

import math
import threading
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from phaseloop.core.vocabulary import (
    Failed,
    Lane,
    LaunchRound,
    Produced,
    RequestId,
    Result,
    SeatRequest,
    SlotIndex,
)

from .protocol import Content, Description, Outcome, RoundError, Seated
from .settings import Likelihood, Pooling
from .sim import ACCEPT_KEY, EMPTY_SEATS, SimModel, describe
from .sim_cost import duration_ns, jittered_ns
from .sim_draws import draw, successes
from .sim_vectors import vectors_of

LENGTH_KEY, SENTENCE_KEY = 4, 5
SENTENCES_MIN, SENTENCES_MAX = 2, 12
CERTAIN = 0.0  # the logarithm of the probability of what is not left to chance


class Prose(Struct, frozen=True):
    """What answers are made of: sentences as token ids, and the id that ends a text."""

    sentences: tuple[tuple[int, ...], ...]
    end: int


class Seat:
    """One sequence: the tokens it consists of, and the text it goes on with."""

    def __init__(self, seat: SeatRequest, content: Content, prose: Prose) -> None:
        self.request_id, self.choice = seat.request_id, seat.choice
        self.tokens = list(content.tokens)
        self.produced = 0
        self.wants_likelihood = content.sampling.n_probs > 0
        self._key = (content.seed, seat.choice)
        self._prose = prose
        self._coming: list[int] = []
        self._sentences_said = 0
        endless = (prose.end, -math.inf) in content.sampling.logit_bias
        span = SENTENCES_MAX - SENTENCES_MIN + 1
        length = SENTENCES_MIN + draw(LENGTH_KEY, *self._key) % span
        self._sentences_left = None if endless else length

    def take(self, count: int) -> tuple[tuple[int, ...], bool]:
        """Up to `count` tokens of the text, and whether it ended before the last of them."""
        while len(self._coming) < count and self._sentences_left != 0:
            sentences = self._prose.sentences
            chosen = draw(SENTENCE_KEY, *self._key, self._sentences_said) % len(sentences)
            self._coming += sentences[chosen]
            self._sentences_said += 1
            if self._sentences_left is not None:
                self._sentences_left -= 1
        taken, self._coming = tuple(self._coming[:count]), self._coming[count:]
        self.tokens += taken
        self.produced += len(taken)
        return taken, len(taken) < count


class LiveSimEngine:
    """Implements engine.protocol.Engine.

    `speed` divides every duration; 0 stands for rounds that take no time at all.  `pooling`: what
    encode rounds give; None: they fail.
    """

    def __init__(
        self,
        model: SimModel,
        prose: Prose,
        *,
        speed: float = 1.0,
        seed: int = 0,
        pooling: Pooling | None = None,
    ) -> None:
        self._model = model
        self._pooling: Pooling | None = pooling
        self._description = replace(describe(model), name=f"sim-{model.name}", pooling=pooling)
        self._prose = prose
        self._speed = speed
        self._seed = seed
        self._slots: dict[SlotIndex, Seat] = {}
        self._cached: dict[SlotIndex, Sequence[int]] = {}  # of slots that were released
        self._saved: dict[tuple[RequestId, int], Seat] = {}
        self._running: int | None = None
        self._cut = threading.Condition()  # guards `_running` and `_is_cut`
        self._is_cut = False

    def describe(self) -> Description:
        return self._description

    def seat(self, seat: SeatRequest, content: Content) -> Seated:
        keep = 0
        held = self._cached.pop(seat.slot, ())
        if seat.reason not in EMPTY_SEATS:
            keep = common_length(held, content.tokens, max(0, len(content.tokens) - 1))
        self._slots[seat.slot] = Seat(seat, content, self._prose)
        return Seated(keep)

    def release(self, slot: SlotIndex, keep: int, version: int) -> None:
        seat = self._slots.pop(slot, None)
        held = self._cached.pop(slot, ()) if seat is None else seat.tokens
        if keep:
            self._cached[slot] = held[:keep]

    def drop(self, request_id: RequestId, choice: int) -> None:
        self._saved.pop((request_id, choice), None)

    # --- rounds -----------------------------------------------------------------------------------

    def run(self, launch: LaunchRound) -> Outcome:
        """Raises RoundError if it was aborted; then no sequence has moved."""
        self._pass_time(launch)
        match launch.kind:
            case "prefill" | "sample" | "decode" | "mixed":
                return self._generate(launch.lanes)
            case "save":
                for lane in launch.lanes:
                    self._saved[lane.request_id, lane.choice] = self._slots[lane.slot]
            case "restore":
                for lane in launch.lanes:
                    self._slots[lane.slot] = self._saved.pop((lane.request_id, lane.choice))
            case "shift":
                for lane in launch.lanes:
                    del self._slots[lane.slot].tokens[lane.start : lane.start + lane.count]
            case "encode":
                return self._encode(launch.lanes)
            case "fork":
                pass  # a seat has known its whole prompt from the beginning
        return Outcome((Produced(),) * len(launch.lanes))

    def abort(self, round_id: int) -> None:
        with self._cut:
            if self._running == round_id:
                self._is_cut = True
                self._cut.notify()

    def _pass_time(self, launch: LaunchRound) -> None:
        if not self._speed:
            return
        cost = self._model.cost
        length_ns = duration_ns(cost, launch, lambda lane: self._slots[lane.slot].produced > 0)
        length_ns = jittered_ns(cost, length_ns, self._seed, launch.round_id)
        with self._cut:
            self._running, self._is_cut = launch.round_id, False
            was_cut = self._cut.wait_for(lambda: self._is_cut, length_ns / 1e9 / self._speed)
            self._running = None
        if was_cut:
            raise RoundError("aborted")

    def _generate(self, lanes: Sequence[Lane]) -> Outcome:
        results: list[Result] = []
        tokens: list[tuple[int, ...]] = []
        likelihoods: list[tuple[Likelihood, ...]] = []
        for lane in lanes:
            seat = self._slots[lane.slot]
            taken, has_ended = self._tokens(seat, lane.outputs) if lane.outputs else ((), False)
            results.append(Produced(len(taken), has_ended))
            tokens.append(taken)
            certain = taken if seat.wants_likelihood else ()
            likelihoods.append(tuple(Likelihood(CERTAIN, ((token, CERTAIN),)) for token in certain))
        return Outcome(tuple(results), tuple(tokens), tuple(likelihoods))

    def _encode(self, lanes: Sequence[Lane]) -> Outcome:
        if self._pooling is None:
            return Outcome((Failed("this server gives no embeddings"),) * len(lanes))
        seats = [self._slots[lane.slot] for lane in lanes]
        vectors = tuple(
            vectors_of(seat.tokens, self._pooling)
            if lane.start + lane.count == len(seat.tokens)
            else None
            for lane, seat in zip(lanes, seats, strict=True)
        )
        return Outcome((Produced(),) * len(lanes), vectors=vectors)

    def _tokens(self, seat: Seat, outputs: int) -> tuple[tuple[int, ...], bool]:
        """The next token, and one more per accepted draft."""
        count = 1
        if outputs > 1:
            key = (ACCEPT_KEY, self._seed, seat.request_id, seat.choice, seat.produced)
            count += successes(self._model.capacity.accept_ppm, outputs - 1, *key)
        return seat.take(count)


def common_length(held: Sequence[int], wanted: Sequence[int], most: int) -> int:
    most = min(most, len(held))
    for position in range(most):
        if held[position] != wanted[position]:
            return position
    return most
