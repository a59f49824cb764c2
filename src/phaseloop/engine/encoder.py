"""The engine of a server for embeddings or ranking: prompts go in, rows come out, nothing stays.

A prompt's rows are pooled as its parts are computed; the round that completes it tells the result.
Nothing is reused from one prompt to the next, since all of a prompt's rows are wanted.
"""

import threading

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
from phaseloop.ops.interface import Aborted, Backend, BackendError, Span

from .pooling import Pool, Pooled
from .protocol import Content, Description, Outcome, RoundError, Seated
from .settings import Vectors

PAGE_LENGTH = 256
NOTHING = Produced()


class Slot:
    """A prompt, and how much of it is computed."""

    def __init__(self, content: Content) -> None:
        self.prompt = content.tokens
        self.length = 0
        self.pool = Pool()


class EncoderEngine:
    """Implements engine.protocol.Engine.

    `whole_prompts`: a prompt is computed in one round, since its rows see each other.  `unstable`:
    as in Description.
    """

    def __init__(
        self,
        backend: Backend,
        pooled: Pooled,
        *,
        slot_count: int,
        context_length: int,
        batch_tokens: int,
        whole_prompts: bool,
        page_count: int | None = None,
        unstable: tuple[str, ...] = (),
        model_digest: str | None = None,
    ) -> None:
        self._backend = backend
        self._pooled = pooled
        self._slots: dict[SlotIndex, Slot] = {}
        self._running: int | None = None
        self._abort_lock = threading.Lock()  # an abort must not reach the round after its own
        pages = slot_count * -(-context_length // PAGE_LENGTH)
        self._description = Description(
            name=f"{backend.name}-{pooled.pooling}",
            slot_count=slot_count,
            batch_tokens=batch_tokens,
            context_length=context_length,
            page_count=pages if page_count is None else page_count,
            page_length=PAGE_LENGTH,
            can_shift=False,
            whole_prompts=whole_prompts,
            pooling=pooled.pooling,
            unstable=unstable,
            model=model_digest,
        )

    def describe(self) -> Description:
        return self._description

    def seat(self, seat: SeatRequest, content: Content) -> Seated:
        self._backend.truncate(seat.slot, 0)
        self._slots[seat.slot] = Slot(content)
        return Seated()

    def run(self, launch: LaunchRound) -> Outcome:
        with self._abort_lock:
            self._running = launch.round_id
        try:
            if launch.kind != "encode":
                refused = Failed("this server gives embeddings, and generates nothing")
                return Outcome((refused,) * len(launch.lanes))
            return self._encode(launch.lanes)
        except (Aborted, BackendError) as error:
            raise RoundError(str(error) or "aborted") from error
        finally:
            with self._abort_lock:
                self._running = None
                self._backend.resume()

    def abort(self, round_id: int) -> None:
        with self._abort_lock:
            if self._running == round_id:
                self._backend.abort()

    def release(self, slot: SlotIndex, keep: int, version: int) -> None:
        self._slots.pop(slot, None)
        self._backend.truncate(slot, 0)

    def drop(self, request_id: RequestId, choice: int) -> None:
        pass  # nothing is ever saved

    def _encode(self, lanes: tuple[Lane, ...]) -> Outcome:
        problems = [self._problem(lane) for lane in lanes]
        sound = [lane for lane, problem in zip(lanes, problems, strict=True) if problem is None]
        spans = [self._span(lane) for lane in sound]
        rows = self._backend.forward(spans) if spans else None
        results: list[Result] = []
        vectors: list[Vectors | None] = []
        row = 0
        for lane, problem in zip(lanes, problems, strict=True):
            if problem is not None or rows is None:
                results.append(Failed(problem or "nothing was computed"))
                vectors.append(None)
                continue
            slot = self._slots[lane.slot]
            count = self._pooled.outputs(lane.start, lane.count, len(slot.prompt))
            self._pooled.taken(slot.pool, rows[row : row + count])
            row += count
            slot.length += lane.count
            result, made = self._made(slot)
            results.append(result)
            vectors.append(made)
        return Outcome(tuple(results), vectors=tuple(vectors))

    def _made(self, slot: Slot) -> tuple[Result, Vectors | None]:
        if slot.length < len(slot.prompt):
            return NOTHING, None
        made = self._pooled.made(slot.pool)
        if made is None:
            return Failed("a value of the embedding is not a number"), None
        return NOTHING, made

    def _span(self, lane: Lane) -> Span:
        prompt = self._slots[lane.slot].prompt
        outputs = self._pooled.outputs(lane.start, lane.count, len(prompt))
        tokens = prompt[lane.start : lane.start + lane.count]
        return Span(lane.slot, lane.start, tokens, outputs, False)

    def _problem(self, lane: Lane) -> str | None:
        """Why a lane cannot be computed; never so while reducer and engine agree."""
        slot = self._slots.get(lane.slot)
        if slot is None or lane.start != slot.length:
            held = 0 if slot is None else slot.length
            return f"slot {lane.slot} holds {held} tokens, the round begins at {lane.start}"
        end, length = lane.start + lane.count, len(slot.prompt)
        if end > length:
            return f"slot {lane.slot}: the prompt ends at {length}"
        if self._description.whole_prompts and lane.count != length:
            return f"slot {lane.slot}: a prompt of {length} tokens in one piece, not {lane.count}"
        return None
