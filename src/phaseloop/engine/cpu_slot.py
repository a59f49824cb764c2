"""What a slot holds of a sequence, as one object: forked, saved, truncated and freed whole."""

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from phaseloop.core.vocabulary import RequestId
from phaseloop.ops.interface import Backend, Region, Snapshot

from .protocol import Content
from .settings import Sampling

Logits = NDArray[np.float32]


class Saved(Struct, frozen=True):
    """A sequence outside its slot; immutable, and complete."""

    request_id: RequestId | None
    choice: int
    content: Content
    tokens: tuple[int, ...]
    cold: int
    pending: int | None
    logits: Logits | None
    cells: Snapshot


class Slot:
    """One slot's sequence: its tokens, its KV region, its last logits, its pending token.

    `tokens` are those whose keys and values the region holds; the pending token was drawn and
    delivered, and waits for the decode round that computes its keys and values.
    """

    def __init__(self, region: Region, backend: Backend) -> None:
        self.region = region
        self._backend = backend
        self._forget()

    def _forget(self) -> None:
        self.request_id: RequestId | None = None
        self.choice = 0
        self.content = Content()
        self.tokens: list[int] = []
        self.cold = 0  # leading tokens whose state has the bits of a prompt computed afresh
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

    def seat(self, request_id: RequestId, choice: int, content: Content, keep: int) -> None:
        """Begin a sequence that finds the first `keep` tokens of its prompt in place."""
        self.truncate(keep)
        self.request_id, self.choice, self.content = request_id, choice, content
        self.pending = self.logits = None

    def common(self, prompt: Sequence[int], limit: int) -> int:
        """How many leading cold tokens the slot shares with a prompt, up to `limit`."""
        limit = min(limit, self.cold, len(prompt))
        for index in range(limit):
            if self.tokens[index] != prompt[index]:
                return index
        return limit

    def truncate(self, length: int) -> None:
        """Back to the first `length` tokens; the logits of a later row are gone with them."""
        self._backend.truncate(self.region, length)
        if length < len(self.tokens):
            del self.tokens[length:]
            self.logits = None
        self.cold = min(self.cold, len(self.tokens))

    def clear(self, keep: int) -> None:
        """The sequence is over; its first `keep` tokens stay as a cache."""
        self.truncate(keep)
        tokens, cold = self.tokens, self.cold
        self._forget()
        self.tokens, self.cold = tokens, cold

    def append(self, tokens: Sequence[int], *, cold: bool) -> None:
        """The region holds these now, too."""
        if cold and self.cold == len(self.tokens):
            self.cold += len(tokens)
        self.tokens += tokens

    def fork(self, parent: "Slot", count: int) -> None:
        """Take the first `count` tokens of another slot; its logits, if they are its last."""
        self._backend.truncate(self.region, 0)
        self._backend.copy(parent.region, self.region, count)
        self.tokens = parent.tokens[:count]
        self.cold = min(parent.cold, count)
        self.logits = parent.logits if count == parent.length else None

    def save(self) -> Saved:
        return Saved(
            self.request_id,
            self.choice,
            self.content,
            tuple(self.tokens),
            self.cold,
            self.pending,
            self.logits,
            self._backend.save(self.region, self.length),
        )

    def restore(self, saved: Saved) -> None:
        self._backend.truncate(self.region, 0)
        self._backend.restore(self.region, saved.cells)
        self.request_id, self.choice, self.content = saved.request_id, saved.choice, saved.content
        self.tokens = list(saved.tokens)
        self.cold = saved.cold
        self.pending, self.logits = saved.pending, saved.logits

    def shift(self, start: int, count: int) -> None:
        """Drop `count` tokens from `start`.  What is left is no prefix of any prompt's cold run."""
        self._backend.shift(self.region, start, count, self.length)
        del self.tokens[start : start + count]
        self.cold = min(self.cold, start)
