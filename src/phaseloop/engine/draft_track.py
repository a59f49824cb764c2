"""What a network that reads hidden rows has seen of each slot, kept in step with the slots.

It has a KV region per slot.  Rows that it did not get to see are not made up: it then begins anew,
at position 0 of its region, where it comes in, and knows less of the text.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from phaseloop.core.vocabulary import SlotIndex
from phaseloop.ops.interface import HiddenBackend, Rows, Snapshot, Span

from .draft import Computed, Followed

WAITING_MAX = 32  # generated tokens that wait for a wish; more are read when they come


class Known(Struct, frozen=True):
    """The target's hidden row of the last of a sequence's first `length` tokens."""

    length: int
    row: Rows


class Track(Struct, frozen=True):
    """The sequence's tokens from `origin` on: first those in the region, then those that wait.

    The last token's hidden row is kept, and that of the last one of the prompt: who goes on from
    where a prompt ended finds it after the answer, too.
    """

    given: Rows  # [len(waiting), W], what came along with those that wait
    origin: int = 0
    held: int = 0  # tokens in the region
    waiting: tuple[int, ...] = ()
    last: Known | None = None
    prompt: Known | None = None

    @property
    def length(self) -> int:
        return self.origin + self.held + len(self.waiting)

    @property
    def carry(self) -> Rows | None:
        """The hidden row of the last token."""
        found = (one for one in (self.last, self.prompt) if one and one.length == self.length)
        return next((one.row for one in found), None)

    def cut(self, length: int) -> "Track":
        """Back to a length of the sequence; where that is before the origin, to nothing."""
        if length >= self.length:
            return self
        if length <= self.origin:
            return Track(self.given[:0])
        held = min(self.held, length - self.origin)
        waiting = length - self.origin - held
        last, prompt = (
            one if one and one.length <= length else None for one in (self.last, self.prompt)
        )
        left = self.waiting[:waiting]
        return Track(self.given[:waiting], self.origin, held, left, last, prompt)

    def wait(self, tokens: Sequence[int], given: Rows) -> "Track":
        rows = np.concatenate((self.given, given))
        return replace(self, waiting=(*self.waiting, *tokens), given=rows)

    def settle(self) -> "Track":
        """Those that wait are in the region now."""
        held = self.held + len(self.waiting)
        return replace(self, held=held, waiting=(), given=self.given[:0])

    def learn(self, row: Rows, *, generated: bool) -> "Track":
        """The hidden row of the last token."""
        last = Known(self.length, row.copy())
        return replace(self, last=last, prompt=self.prompt if generated else last)


class Tracked(Struct, frozen=True):
    """Implements draft.Followed."""

    track: Track
    cells: Snapshot

    @property
    def size_bytes(self) -> int:
        known = {id(one): one.row.nbytes for one in (self.track.last, self.track.prompt) if one}
        return self.cells.size_bytes + self.track.given.nbytes + sum(known.values())


class Tracks(ABC):
    """The half of draft.Drafter that keeps in step.  Owns its backend, whose regions are slots."""

    def __init__(self, backend: HiddenBackend, *, slot_count: int, width: int) -> None:
        """`width` is of the rows that come along with tokens."""
        self._backend = backend
        self._nothing = Track(np.empty((0, width), np.float32))
        self._tracks = [self._nothing] * slot_count

    @property
    def position_bytes(self) -> int:
        return self._backend.position_bytes

    def track(self, slot: SlotIndex) -> Track:
        return self._tracks[slot]

    def span(self, slot: SlotIndex, outputs: int, *, generated: bool) -> Span:
        """A lane over all that waits."""
        track = self._tracks[slot]
        return Span(slot, track.held, track.waiting, outputs, generated, given=track.given)

    def meet(self, slot: SlotIndex, start: int) -> Track:
        """The track of the sequence's first `start` tokens, or a new one that begins there."""
        track = self._tracks[slot].cut(start)
        if track.length != start:
            track = replace(self._nothing, origin=start)
        return track

    def follow(self, computed: Sequence[Computed]) -> None:
        """A prompt's rows are read at once, generated ones when drafts are wanted."""
        reading: list[SlotIndex] = []
        for one in computed:
            if one.hidden is None or one.start == len(one.sequence):
                continue
            track = self._tracks[one.slot] = self._with(one, one.hidden)
            if not one.generated or len(track.waiting) > WAITING_MAX:
                reading.append(one.slot)
        self.read(reading)

    @abstractmethod
    def _with(self, one: Computed, hidden: Rows) -> Track:
        """A slot's track with what was computed."""

    def read(self, slots: Sequence[SlotIndex]) -> None:
        """Bring what waits into the regions."""
        if not slots:
            return
        self._backend.forward([self.span(slot, 0, generated=False) for slot in slots])
        for slot in slots:
            self._tracks[slot] = self._tracks[slot].settle()

    def truncate(self, slot: SlotIndex, length: int) -> None:
        self._tracks[slot] = self._tracks[slot].cut(length)
        self._backend.truncate(slot, self._tracks[slot].held)

    def fork(self, source: SlotIndex, target: SlotIndex, length: int) -> None:
        track = self._tracks[source].cut(length)
        self._backend.truncate(target, 0)
        self._backend.copy(source, target, track.held)
        self._tracks[target] = track

    def save(self, slot: SlotIndex, length: int) -> Tracked | None:
        track = self._tracks[slot].cut(length)
        return Tracked(track, self._backend.save(slot, track.held)) if track.length else None

    def restore(self, slot: SlotIndex, state: Followed | None, length: int) -> None:
        self.truncate(slot, 0)
        if isinstance(state, Tracked):
            track = state.track.cut(length)
            self._backend.restore(slot, state.cells.first(track.held))
            self._tracks[slot] = track

    def shift(self, slot: SlotIndex, start: int, count: int) -> None:
        """What comes after the gap was read with what was dropped: it is forgotten, too."""
        self.truncate(slot, start)

    def abort(self) -> None:
        self._backend.abort()

    def resume(self) -> None:
        self._backend.resume()

    def close(self) -> None:
        self._backend.close()
