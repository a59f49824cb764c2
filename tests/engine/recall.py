"""A model whose keys and values are its tokens, and a shell to drive it through any interleaving.

The model's next token is a checksum of all cells up to the last row, and a cell says whether its
token was generated: so whoever computes on a cell that a cold run would not have gets another
answer, and `answer` knows the right one without an engine.
"""

import random
import zlib
from collections import deque
from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from phaseloop.core.policy import PRESETS
from phaseloop.core.reduce import deadline_next, reduce
from phaseloop.core.state import initial
from phaseloop.core.vocabulary import (
    AbortRound,
    ClientResumed,
    ClientStalled,
    DeadlineReached,
    DeliverTokens,
    DropSaved,
    FinishChoice,
    FinishRequest,
    LaunchRound,
    ReleaseSlot,
    Request,
    RequestArrived,
    RequestCancelled,
    RequestSeated,
    RoundCompleted,
    RoundFailed,
    SeatRequest,
    StopMatched,
)
from phaseloop.engine.cpu import ModelEngine
from phaseloop.engine.draft_model import DraftModel
from phaseloop.engine.protocol import Content, RoundError, limits_of
from phaseloop.engine.sampling import ChainSampler
from phaseloop.engine.settings import GREEDY
from phaseloop.engine.snapshots import Snapshots
from phaseloop.engine.speculate import Terms
from phaseloop.ops.interface import Aborted, BackendError, Snapshot, Span
from phaseloop.runtime.prefixes import PrefixIndex

VOCABULARY = 64
GARBAGE = -1


def cell(token: int, generated: bool) -> int:
    return 2 * token + generated


def next_token(cells: Sequence[int]) -> int:
    return zlib.crc32(np.array(cells, np.int64).tobytes()) % VOCABULARY


def answer(
    prompt: Sequence[int],
    count: int,
    *,
    like_prompt: bool = False,
    shift_keep: int | None = None,
    context: int = 1 << 20,
) -> list[int]:
    """What a cold run generates; half of what may go goes where the context is full."""
    cells = [cell(token, False) for token in prompt]
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(next_token(cells))
        if len(cells) == context and shift_keep is not None:
            keep = min(shift_keep, context // 2)
            del cells[keep : keep + (context - keep + 1) // 2]
        cells.append(cell(tokens[-1], not like_prompt))
    return tokens


class RecallBackend:
    """Implements ops.interface.Backend.  What is not written, or given back, is garbage."""

    name = "recall"
    position_bytes = 8
    state_bytes = 0

    def __init__(self, regions: int, capacity: int, *, like_prompt: bool = False) -> None:
        self._cells = np.full((regions, capacity), GARBAGE, np.int64)
        self._like_prompt = like_prompt
        self._is_aborted = False
        self.fails = False  # the next pass does, once

    def positions(self, region: int) -> None:
        return None

    def forward(self, spans: Sequence[Span]) -> np.ndarray:
        rows: list[np.ndarray] = []
        for span in spans:
            own = self._cells[span.region]
            assert (own[: span.start] != GARBAGE).all(), "a row is computed on cells that are gone"
            assert (own[span.start :] == GARBAGE).all(), "a region holds more than its sequence"
            if self.fails or self._is_aborted:
                own[span.start : span.start + len(span.tokens)] = GARBAGE - 1
                continue
            for offset, token in enumerate(span.tokens):
                generated = span.generated and not self._like_prompt
                own[span.start + offset] = cell(token, generated)
            for row in range(len(span.tokens) - span.outputs, len(span.tokens)):
                logits = np.zeros(VOCABULARY, np.float32)
                logits[next_token(own[: span.start + row + 1].tolist())] = 1
                rows.append(logits)
        if self._is_aborted:
            raise Aborted
        if self.fails:
            self.fails = False
            raise BackendError("injected")
        return np.array(rows or np.zeros((1, VOCABULARY)), np.float32)

    def abort(self) -> None:
        self._is_aborted = True

    def resume(self) -> None:
        self._is_aborted = False

    def truncate(self, region: int, length: int) -> None:
        self._cells[region, length:] = GARBAGE

    def copy(self, source: int, target: int, length: int) -> None:
        self._cells[target, :length] = self._cells[source, :length]

    def save(self, region: int, length: int) -> Snapshot:
        part = self._cells[region, :length].copy().view(np.uint8).reshape(length, 8)
        part.flags.writeable = False
        return Snapshot(length, (part,))

    def restore(self, region: int, snapshot: Snapshot) -> None:
        (part,) = snapshot.parts
        self._cells[region, : snapshot.length] = part.view(np.int64).reshape(-1)

    def shift(self, region: int, start: int, count: int, length: int) -> None:
        own = self._cells[region]
        own[start : length - count] = own[start + count : length].copy()
        self.truncate(region, length - count)

    def close(self) -> None:
        pass


def recall_engine(
    slots: int = 3,
    context: int = 256,
    *,
    reuse_generated: bool = False,
    ram_bytes: int = 1 << 20,
    pages: int | None = None,
    drafter: RecallBackend | None = None,
    kind: type[RecallBackend] = RecallBackend,
) -> tuple[ModelEngine, RecallBackend]:
    """`drafter`: the backend of a model that drafts, with a region per slot."""
    backend = kind(slots, context, like_prompt=reuse_generated)
    engine = ModelEngine(
        backend,
        ChainSampler(),
        slot_count=slots,
        context_length=context,
        batch_tokens=64,
        end_tokens=frozenset(),
        reuse_generated=reuse_generated,
        page_count=pages,
        snapshots=Snapshots(ram_bytes),
        drafter=drafter and drafting(drafter, slots, context),
        terms=Terms(cost=0.0),
    )
    return engine, backend


def drafting(backend: RecallBackend, slots: int, context: int) -> DraftModel:
    return DraftModel(
        backend,
        ChainSampler(),
        slot_count=slots,
        most=4,
        context_length=context,
        vocabulary=VOCABULARY,
        target_vocabulary=VOCABULARY,
        end_tokens=frozenset(),
    )


class Shell:
    """Reducer, index and engine; whoever calls says what happens when.

    As with the worker, the engine does seats and releases at once while it is free, else after its
    round, and answers them before the round.
    """

    def __init__(self, engine: ModelEngine, policy: str = "barrier-fair", **limits: object) -> None:
        self.engine = engine
        bounds = replace(limits_of(engine.describe()), **limits)
        self.state = initial(bounds, PRESETS[policy])
        self.index = PrefixIndex(bounds, engine.describe(), engine.snapshots)
        self.now_ns = 0
        self.prompts: dict[int, tuple[int, ...]] = {}
        self.requests: dict[int, Request] = {}
        self.given: dict[tuple[int, int], list[int]] = {}
        self.cached: dict[int, int] = {}  # as its first seat found
        self.slots: dict[int, int] = {}
        self.finished: dict[int, str] = {}
        self.ended: dict[tuple[int, int], str] = {}  # choices
        self.kinds: list[str] = []  # of rounds
        self.computed: dict[int, int] = {}  # tokens of each prompt, in rounds without answers
        self._flight: LaunchRound | None = None
        self._is_aborted = False
        self._waiting: deque[SeatRequest | ReleaseSlot | DropSaved] = deque()
        self._drawn: dict[tuple[int, int], tuple[int, ...]] = {}

    # --- what may happen --------------------------------------------------------------------------

    def arrive(self, *prompts: Sequence[int], **fields: object) -> list[int]:
        requests: list[Request] = []
        for prompt in prompts:
            request = Request(len(self.prompts), len(prompt), **fields)
            self.prompts[request.request_id] = tuple(prompt)
            request = self.index.place(request, tuple(prompt))
            self.requests[request.request_id] = request
            requests.append(request)
        self.post(RequestArrived(at_ns=self.now_ns, requests=tuple(requests)))
        return [request.request_id for request in requests]

    def cancel(self, request_id: int) -> None:
        self.post(RequestCancelled(at_ns=self.now_ns, request_id=request_id))

    def stop(self, request_id: int) -> None:
        self.post(StopMatched(at_ns=self.now_ns, request_id=request_id))

    def stall(self, request_id: int) -> None:
        self.post(ClientStalled(at_ns=self.now_ns, request_id=request_id))

    def resume(self, request_id: int) -> None:
        self.post(ClientResumed(at_ns=self.now_ns, request_id=request_id))

    @property
    def is_busy(self) -> bool:
        return self._flight is not None

    def live(self) -> list[int]:
        return [request_id for request_id in self.prompts if request_id not in self.finished]

    def complete(self) -> None:
        """The round that is running comes to its end, one way or another."""
        launch = self._flight
        assert launch is not None, "a round is running"
        if self._is_aborted:
            self.engine._backend.abort()
        try:
            outcome = self.engine.run(launch)
        except RoundError as error:
            event = RoundFailed(at_ns=0, round_id=launch.round_id, reason=error.reason)
        else:
            pairs = zip(launch.lanes, outcome.tokens, strict=True)
            self._drawn = {(lane.request_id, lane.choice): ids for lane, ids in pairs}
            event = RoundCompleted(
                at_ns=0,
                round_id=launch.round_id,
                results=outcome.results,
                duration_ns=1000,
                drafted=outcome.drafted,
            )
        self._flight, self._is_aborted = None, False
        answers = [self._do(job) for job in self._waiting]
        self._waiting.clear()
        for one in (*filter(None, answers), event):
            self.post(replace(one, at_ns=self.now_ns))

    def drain(self) -> "Shell":
        """Until nothing happens by itself any more."""
        while True:
            if self.is_busy:
                self.complete()
            elif (due_ns := deadline_next(self.state)) is not None:
                self.now_ns = max(self.now_ns, due_ns)
                self.post(DeadlineReached(at_ns=self.now_ns))
            else:
                return self

    def post(self, event: object) -> None:
        self.now_ns += 1000
        before = self.state
        self.state, effects = reduce(before, event)
        self.index.observe(event, before, self.state, effects)
        answers: list[RequestSeated] = []
        for effect in effects:
            match effect:
                case LaunchRound():
                    assert self._flight is None
                    self._flight = effect
                    self.kinds.append(effect.kind)
                    for lane in effect.lanes if effect.kind == "prefill" else ():
                        count = self.computed.get(lane.request_id, 0)
                        self.computed[lane.request_id] = count + lane.count
                case AbortRound():
                    self._is_aborted = True
                case DeliverTokens():
                    self._deliver(effect)
                case FinishChoice(request_id, choice, reason):
                    self.ended[request_id, choice] = reason
                case FinishRequest(request_id, reason):
                    self.finished[request_id] = reason
                case SeatRequest() | ReleaseSlot() | DropSaved() if self._flight is not None:
                    self._waiting.append(effect)
                case SeatRequest() | ReleaseSlot() | DropSaved():
                    answers += filter(None, [self._do(effect)])
                case _:
                    pass
        for one in answers:
            self.post(replace(one, at_ns=self.now_ns))

    def _do(self, job: SeatRequest | ReleaseSlot | DropSaved) -> RequestSeated | None:
        match job:
            case SeatRequest(request_id, choice, slot):
                request = self.requests[request_id]
                content = Content(self.prompts[request_id], 0, GREEDY, request.keep_cache)
                seated = self.engine.seat(job, content)
                self.slots.setdefault(request_id, slot)
                self.cached.setdefault(request_id, seated.cached_length)
                return RequestSeated(
                    at_ns=0,
                    request_id=request_id,
                    choice=choice,
                    slot=slot,
                    cached_length=seated.cached_length,
                    restore=seated.restore,
                )
            case ReleaseSlot(slot, keep, version):
                self.engine.release(slot, keep, version)
            case DropSaved(request_id, choice):
                self.engine.drop(request_id, choice)
        return None

    def _deliver(self, effect: DeliverTokens) -> None:
        for one in effect.deliveries:
            key = (one.request_id, one.choice)
            ids = self._drawn[key][: one.tokens]
            self.given.setdefault(key, []).extend(ids)
            self.index.deliver(one, ids)


def chance(source: random.Random, percent: int) -> bool:
    return source.randrange(100) < percent
