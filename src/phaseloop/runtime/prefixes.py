"""Where the beginning of a prompt can be found: in a slot, in host RAM, or with a live request.

The index follows the reducer's effects: who sits in which slot, and how much of that a slot was
left with under which version.  So it knows what `Request.candidates` needs without asking the
engine, whose thread may be computing.  The engine compares for itself when it seats (R2): a mistake
here costs time, never a wrong answer.

Which slot.  As in llama-server a slot is a candidate if it holds more than `similarity` of the
prompt.  But one that would lose something worth keeping is none: the prompt then gets the slot
that has been idle longest, the common beginning is copied there, and both lines go on.

A slot that is taken now is a candidate, too, under the version it will have when it is released: a
prompt that waits for its seat finds what is in a slot by then.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from phaseloop.core.state import Limits, State
from phaseloop.core.vocabulary import (
    AnyEvent,
    Candidate,
    Delivery,
    Effects,
    FinishRequest,
    ReleaseSlot,
    Request,
    RequestId,
    SeatRequest,
    Shared,
    SlotIndex,
)
from phaseloop.engine.protocol import Description
from phaseloop.engine.reuse import Positions, reusable
from phaseloop.engine.settings import Adapters
from phaseloop.engine.snapshots import (
    Ids,
    Snapshots,
    common_length,
    is_worth_keeping,
    packed,
)

NO_IDS = packed(())
SIMILARITY = 0.1  # llama-server's --slot-prompt-similarity


class Prefixes(Protocol):
    """What the gateway and the loop tell, and ask, about earlier prompts."""

    def place(self, request: Request, tokens: Sequence[int], adapters: Adapters = ()) -> Request:
        """The request with its `candidates` and `shared` filled in; it is about to arrive."""
        ...

    def observe(self, event: AnyEvent, before: State, after: State, effects: Effects) -> None:
        """A step of the loop, before its effects are performed."""
        ...

    def deliver(self, delivery: Delivery, ids: Sequence[int]) -> None: ...

    def held(self, slot: SlotIndex) -> tuple[Ids, Adapters]:
        """The tokens whose state an idle slot was left with, and what computed it."""
        ...


def anywhere(_slot: SlotIndex) -> Positions:
    return None


class Line:
    """The tokens of one request: its prompt, and what its choices were given."""

    def __init__(self, request: Request, prompt: Ids, adapters: Adapters = ()) -> None:
        self.request = request
        self.prompt = prompt
        self.adapters = adapters
        self.generated: dict[int, list[int]] = {}


class Held(Struct, frozen=True):
    """What a slot holds: the first `length` tokens of a line.

    While it is seated: what it may be left with, and the version it will have then.
    """

    line: Line
    choice: int
    length: int
    version: int
    is_seated: bool


class PrefixIndex:
    """Implements Prefixes.  Belongs to the event loop's thread.

    `similarity` is a share of the prompt, from 0 to 1; with 0 no slot is a candidate.  `positions`
    says at which lengths what an idle slot holds can be taken up.
    """

    def __init__(
        self,
        limits: Limits,
        description: Description,
        snapshots: Snapshots,
        *,
        similarity: float = SIMILARITY,
        positions: Callable[[SlotIndex], Positions] = anywhere,
    ) -> None:
        self._limits = limits
        self._reuses_generated = description.reuses_generated
        self._snapshots = snapshots
        self._similarity = similarity
        self._positions = positions
        self._slots: list[Held | None] = [None] * limits.slot_count
        self._lines: dict[RequestId, Line] = {}  # of requests that have not ended
        self._kin: dict[tuple[int, bytes], list[RequestId]] = {}  # alike in their first tokens
        self._ended: list[RequestId] = []  # in the step that is being performed

    def place(self, request: Request, tokens: Sequence[int], adapters: Adapters = ()) -> Request:
        self._forget_ended()
        if request.kind != "completion" or not tokens:
            return request
        line = Line(request, packed(tokens), adapters)
        shared = self._shared(line)
        self._lines[request.request_id] = line
        if (key := self._key(line)) is not None:
            self._kin.setdefault(key, []).append(request.request_id)
        if not request.keep_cache:
            return request
        return replace(request, candidates=self._candidates(line), shared=shared)

    def observe(self, event: AnyEvent, before: State, after: State, effects: Effects) -> None:
        self._forget_ended()
        for effect in effects:
            match effect:
                case SeatRequest():
                    self._on_seat(effect)
                case ReleaseSlot():
                    held = self._slots[effect.slot]
                    if held is not None:
                        self._slots[effect.slot] = replace(
                            held, length=effect.keep, version=effect.version, is_seated=False
                        )
                case FinishRequest():
                    self._ended.append(effect.request_id)
                case _:
                    pass

    def deliver(self, delivery: Delivery, ids: Sequence[int]) -> None:
        if self._reuses_generated and (line := self._lines.get(delivery.request_id)):
            line.generated.setdefault(delivery.choice, []).extend(ids)

    def held(self, slot: SlotIndex) -> tuple[Ids, Adapters]:
        held = self._slots[slot]
        if held is None or held.is_seated:
            return NO_IDS, ()
        return self._ids(held), held.line.adapters

    # --- what a prompt may find -------------------------------------------------------------------

    def _candidates(self, line: Line) -> tuple[Candidate, ...]:
        """At least one token is left to compute, so none of them has the whole prompt."""
        wanted = line.prompt[:-1]
        candidates: list[Candidate] = []
        for slot, held in enumerate(self._slots):
            if held is None or held.line.request.adapter != line.request.adapter:
                continue
            # Of a prompt that is being computed nobody knows yet where its states will be.
            positions = None if held.is_seated else self._positions(slot)
            length = self._usable(held, line.prompt, positions)
            if length:
                candidates.append(Candidate("slot", slot, held.version, length))
        found = self._snapshots.find(wanted, line.adapters)
        if found is not None:
            candidates.append(Candidate("snapshot", found.kept.snapshot_id, 0, found.length))
        return tuple(candidates)

    def _usable(self, held: Held, prompt: Ids, positions: Positions) -> int:
        """How many tokens a prompt would find in this slot if it took it; 0 if it should not."""
        ids = self._ids(held)
        length = reusable(common_length(ids, prompt), len(prompt), positions)
        is_similar = 0 < self._similarity < length / len(prompt)
        lost = len(ids) - length
        return 0 if not is_similar or is_worth_keeping(lost, len(ids)) else length

    def _ids(self, held: Held) -> Ids:
        line = held.line
        generated = line.generated.get(held.choice)
        if not generated or held.length <= len(line.prompt):
            return line.prompt[: held.length]
        return np.concatenate((line.prompt, packed(generated)))[: held.length]

    def _shared(self, line: Line) -> tuple[Shared, ...]:
        """Earlier requests to fork from (R18): those seated, and the last that wait for a seat."""
        key = self._key(line)
        kin = self._kin.get(key, []) if key is not None else []
        if not kin or not line.request.keep_cache:
            return ()
        seated = {held.line.request.request_id for held in self._slots if held and held.is_seated}
        chosen = {other for other in kin if other in seated} | set(kin[-self._limits.slot_count :])
        return tuple(
            Shared(other, common_length(self._lines[other].prompt, line.prompt))
            for other in sorted(chosen)
        )

    def _key(self, line: Line) -> tuple[int, bytes] | None:
        """The same for all that have as much in common as is worth a fork; None if too short."""
        length = self._limits.share_length_min
        if len(line.prompt) < length:
            return None
        return line.request.adapter, line.prompt[:length].tobytes()

    # --- bookkeeping ------------------------------------------------------------------------------

    def _on_seat(self, seat: SeatRequest) -> None:
        line = self._lines.get(seat.request_id)
        held = self._slots[seat.slot]
        version = 0 if held is None else held.version
        if line is None:  # its tokens are not known, or of no use to others
            line = Line(Request(seat.request_id, 0), packed(()))
        length = len(line.prompt) if line.request.keep_cache else 0
        self._slots[seat.slot] = Held(line, seat.choice, length, version + 1, is_seated=True)

    def _forget_ended(self) -> None:
        """Only now: the tokens of their last round were delivered after they were seen to end."""
        for request_id in self._ended:
            line = self._lines.pop(request_id, None)
            key = None if line is None else self._key(line)
            if key is not None:
                kin = self._kin[key]
                kin.remove(request_id)
                if not kin:
                    del self._kin[key]
        self._ended.clear()
