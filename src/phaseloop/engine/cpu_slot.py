"""What a slot holds of a sequence, as one object: forked, saved, truncated and freed whole."""

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from phaseloop.core.vocabulary import RequestId
from phaseloop.ops.interface import Backend, Region, Snapshot

from .draft import Drafter, Followed, NoDrafts
from .draft_width import Width
from .protocol import Content
from .reuse import reachable
from .settings import Adapters, Sampling
from .snapshots import Ids, Kept, common_length, packed

Logits = NDArray[np.float32]
NO_IDS = packed(())


class Saved(Struct, frozen=True):
    """A sequence outside its slot; immutable, and complete."""

    request_id: RequestId | None
    choice: int
    content: Content
    tokens: tuple[int, ...]
    cold: int
    dropped: int
    pending: int | None
    logits: Logits | None
    marks: tuple[int, ...]
    width: Width
    cells: Snapshot  # of the tokens that are not owed
    followed: Followed | None


class Source(Struct, frozen=True):
    """Where a seat's prefix is copied from by its restore round."""

    ids: Ids  # the prefix
    adapters: Adapters  # it was computed with
    holder: "Kept | Slot"

    def length(self) -> int:
        """How much of the prefix its holder still has."""
        if isinstance(self.holder, Kept):
            return common_length(self.holder.ids, self.ids)
        return self.holder.usable(self.ids, self.adapters)


class Slot:
    """One slot's sequence: its tokens, its KV region, its last logits, its pending token.

    `tokens` are those that were computed; the pending token was drawn and delivered, and waits for
    the decode round that computes it.  A recurrent state that went over a rejected draft goes back
    to before that round: then the tokens of it that stay are owed, and computed once more by the
    next round, before its own.  Of those that are not owed the region holds keys and values.

    `kept` are the leading tokens that other prompts may find here: what the slot was left with, as
    far as nothing has overwritten it.  All of `tokens` were computed with the same `adapters`.
    """

    def __init__(self, region: Region, backend: Backend, drafter: Drafter | None = None) -> None:
        self.region = region
        self._backend = backend
        self._drafter = NoDrafts() if drafter is None else drafter
        self._forget()

    def _forget(self) -> None:
        self.request_id: RequestId | None = None
        self.choice = 0
        self.content = Content()
        self.tokens: list[int] = []
        self.adapters: Adapters = ()
        self.held = 0  # leading tokens that are not owed
        self.width = Width()
        self.cold = 0  # leading tokens whose state has the bits of a prompt computed afresh
        self.kept: Ids = NO_IDS
        self.dropped = 0  # tokens that context shifts took out of this sequence
        self.source: Source | None = None
        self.marks: tuple[int, ...] = ()  # where the prompt's recurrent states are to be kept
        self.pending: int | None = None
        self.logits: Logits | None = None

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.content.tokens

    @property
    def seed(self) -> int:
        return self.content.seed

    @property
    def sampling(self) -> Sampling:
        return self.content.sampling

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def position(self) -> int:
        """Of the next token in its text.  It never goes back, unlike the length (context shift).

        So no two draws of an answer get the same random numbers.
        """
        return self.dropped + len(self.tokens)

    def usable(self, prompt: Ids, adapters: Adapters) -> int:
        """How much of a prompt's beginning can be found here."""
        if adapters != self.adapters:
            return 0
        positions = self._backend.positions(self.region)
        return reachable(common_length(self.kept, prompt), positions)

    def can_reach(self, length: int) -> bool:
        """Whether the sequence can be cut to a length, and go on from there."""
        return reachable(length, self._backend.positions(self.region)) == length

    def seat(
        self, request_id: RequestId, choice: int, content: Content, keep: int, source: Source | None
    ) -> None:
        """Begin a sequence that finds the first `keep` tokens of its prompt in place."""
        self.truncate(keep)
        self.request_id, self.choice, self.content = request_id, choice, content
        self.adapters = content.adapters
        self.source, self.marks, self.dropped = source, (), 0
        self.pending = self.logits = None
        self.width = Width()

    def truncate(self, length: int) -> None:
        """Back to the first `length` tokens; the logits of a later row are gone with them."""
        self._backend.truncate(self.region, length)
        self._drafter.truncate(self.region, length)
        if length < len(self.tokens):
            del self.tokens[length:]
            self.logits = None
        self.held = min(self.held, length)
        self.cold = min(self.cold, len(self.tokens))
        self.kept = self.kept[:length]

    def clear(self, keep: int) -> None:
        """The sequence is over; its first `keep` tokens that are held stay as a cache."""
        self.truncate(min(keep, self.held))
        tokens, cold, adapters = self.tokens, self.cold, self.adapters
        self._forget()
        self.tokens, self.cold, self.held = tokens, cold, len(tokens)
        self.adapters = adapters
        self.kept = packed(tokens[:cold])

    def append(self, tokens: Sequence[int], *, cold: bool) -> None:
        """The region holds these now, too, and all before them."""
        if cold and self.cold == len(self.tokens):
            self.cold += len(tokens)
        self.tokens += tokens
        self.held = len(self.tokens)

    def reject(self, start: int) -> None:
        """The pass over the rows from `start` on went beyond the tokens that stay."""
        length = len(self.tokens)
        if self._backend.state_bytes:
            length = start
        self._backend.truncate(self.region, length)
        self.held = length

    def fork(self, parent: "Slot", count: int) -> None:
        """Take the first `count` tokens of another slot; its logits, if they are its last."""
        self._backend.truncate(self.region, 0)
        self._backend.copy(parent.region, self.region, count)
        self._drafter.fork(parent.region, self.region, count)
        self.tokens = parent.tokens[:count]
        self.held = count
        self.cold = min(parent.cold, count)
        self.kept = NO_IDS
        self.logits = parent.logits if count == parent.length else None

    def bring(self, source: Source, count: int) -> None:
        """Take the first `count` tokens of a cached prefix."""
        self._backend.truncate(self.region, 0)
        if isinstance(source.holder, Kept):
            self._backend.restore(self.region, source.holder.cells.first(count))
            self._drafter.restore(self.region, source.holder.followed, count)
        else:
            self._backend.copy(source.holder.region, self.region, count)
            self._drafter.fork(source.holder.region, self.region, count)
        self.kept = source.ids[:count]
        self.tokens = self.kept.tolist()
        self.cold = self.held = count
        self.logits = None

    def save(self) -> Saved:
        return Saved(
            self.request_id,
            self.choice,
            self.content,
            tuple(self.tokens),
            self.cold,
            self.dropped,
            self.pending,
            self.logits,
            self.marks,
            self.width,
            self._backend.save(self.region, self.held),
            self._drafter.save(self.region, self.length),
        )

    def restore(self, saved: Saved) -> None:
        self._backend.truncate(self.region, 0)
        self._backend.restore(self.region, saved.cells)
        self._drafter.restore(self.region, saved.followed, len(saved.tokens))
        self.request_id, self.choice, self.content = saved.request_id, saved.choice, saved.content
        self.tokens, self.held = list(saved.tokens), saved.cells.length
        self.adapters = saved.content.adapters
        self.width = saved.width
        self.cold, self.dropped = saved.cold, saved.dropped
        self.kept = NO_IDS
        self.pending, self.logits, self.marks = saved.pending, saved.logits, saved.marks

    def shift(self, start: int, count: int) -> None:
        """Drop `count` tokens from `start`.  What is left is no prefix of any prompt's cold run."""
        self._backend.shift(self.region, start, count, self.length)
        self._drafter.shift(self.region, start, count)
        del self.tokens[start : start + count]
        self.held = len(self.tokens)
        self.dropped += count
        self.cold = min(self.cold, start)
        self.kept = self.kept[:start]
