"""Drafts out of the text itself: where its last tokens stood before, what followed comes again.

Costs no model and no memory to speak of, and helps where texts repeat themselves: code that is
edited, documents that are quoted, structures that recur.
"""

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from phaseloop.core.vocabulary import SlotIndex

from .draft import Computed, Followed, Wish

Ids = NDArray[np.int32]
ROOM_MIN = 1024  # tokens


class Ngrams(Struct, frozen=True):
    """llama-server's settings of ngram-simple, and its defaults."""

    size_n: int = 12  # tokens that must have stood before
    size_m: int = 48  # drafts, at most
    min_hits: int = 1  # how often they must have stood before


class Text:
    """A slot's tokens, for fast comparison; it grows by what is new."""

    def __init__(self) -> None:
        self._room: Ids = np.empty(ROOM_MIN, np.int32)
        self.length = 0

    def catch_up(self, tokens: Sequence[int]) -> Ids:
        """All of `tokens`, which begin as this text does."""
        count = len(tokens)
        if count > len(self._room):
            grown = np.empty(2 * count, np.int32)
            grown[: self.length] = self._room[: self.length]
            self._room = grown
        self._room[self.length : count] = tokens[self.length :]
        self.length = count
        return self._room[:count]


class NgramDrafter:
    """Implements draft.Drafter.  All it knows it reads off the sequences that it is shown."""

    name = "ngram-simple"
    wants_hidden = False
    position_bytes = 0

    def __init__(self, settings: Ngrams, slot_count: int) -> None:
        self.most = settings.size_m
        self._settings = settings
        self._texts = [Text() for _ in range(slot_count)]

    def propose(self, wishes: Sequence[Wish]) -> list[tuple[int, ...]]:
        return [self._propose(wish) for wish in wishes]

    def _propose(self, wish: Wish) -> tuple[int, ...]:
        text = self._texts[wish.slot].catch_up(wish.draw.tokens)
        settings = self._settings
        return continuation(text, settings, min(wish.count, settings.size_m))

    def follow(self, computed: Sequence[Computed]) -> None:
        """Nothing to do: a wish shows the whole sequence."""

    def truncate(self, slot: SlotIndex, length: int) -> None:
        text = self._texts[slot]
        text.length = min(text.length, length)

    def fork(self, source: SlotIndex, target: SlotIndex, length: int) -> None:
        self.truncate(target, 0)

    def save(self, slot: SlotIndex, length: int) -> None:
        return None

    def restore(self, slot: SlotIndex, state: Followed | None, length: int) -> None:
        self.truncate(slot, 0)

    def shift(self, slot: SlotIndex, start: int, count: int) -> None:
        self.truncate(slot, start)

    def abort(self) -> None: ...

    def resume(self) -> None: ...

    def close(self) -> None: ...


def continuation(text: Ids, settings: Ngrams, count: int) -> tuple[int, ...]:
    """What followed the text's last `size_n` tokens where they stood last, at most `count` tokens.

    If that reaches the end of the text, the text has come full circle, and is taken to go on so.
    """
    size = settings.size_n
    ends = earlier_ends(text, size)
    if len(ends) < settings.min_hits:
        return ()
    start = int(ends[-1])
    circle = len(text) - start
    places = start + np.arange(count) % circle
    return tuple(text[places].tolist())


def earlier_ends(text: Ids, size: int) -> NDArray[np.intp]:
    """Where the last `size` tokens stood before, ascending: the place after each."""
    if len(text) <= size:
        return np.empty(0, np.intp)
    # From the last token back, so that few candidates are left after the first look.
    found = np.flatnonzero(text[size - 1 : -1] == text[-1]) + size
    for back in range(2, size + 1):
        if not len(found):
            break
        found = found[text[found - back] == text[-back]]
    return found
