"""Who guesses how a text goes on, so that one pass can check several tokens: the protocol.

A guess costs no bits.  The engine computes a sequence's pending token and its drafts as generated
rows of one pass, samples at each position what it would have sampled anyway, and accepts a draft
only if that is the same token.  So a drafter may be wrong, late or ignorant; it may not be slow.

A drafter keeps a state per slot, which is a part of that slot's sequence: it follows the tokens
that the target computed, and is cut, forked, saved and restored with them.  A state that lags is no
error: it drafts less well, or not at all, until it has caught up.  Calls come from the engine's
thread, one at a time, `abort` excepted.
"""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from phaseloop.core.vocabulary import SlotIndex
from phaseloop.ops.interface import Rows

from .sampler import Draw


class Computed(Struct, frozen=True):
    """Tokens of one slot that the target has just computed, and that stay: sequence[start:].

    Of a decode lane these are the pending token and the accepted drafts, never a rejected one.
    `sequence` is read only, and only during the call.
    """

    slot: SlotIndex
    sequence: Sequence[int]  # all that the slot holds now
    start: int
    generated: bool
    # [len(sequence) - start, width]: what the target's network gave beside the logits, row by row,
    # to a drafter that wants it.
    hidden: Rows | None = None


class Wish(Struct, frozen=True):
    """A slot that has use for drafts.

    `draw` is how the target will sample the first of them: `draw.tokens` is the sequence, its
    pending token the last of them; read only, and only during the call.
    """

    slot: SlotIndex
    count: int  # at most; positive
    p_min: float
    draw: Draw


class Followed(Protocol):
    """A slot's drafting state outside its slot: immutable, so it can be shared."""

    @property
    def size_bytes(self) -> int: ...


class Drafter(Protocol):
    @property
    def name(self) -> str:
        """llama-server's name of the kind: "ngram-simple", "draft-simple", "draft-mtp"."""
        ...

    @property
    def wants_hidden(self) -> bool:
        """Whether `Computed.hidden` is read: then the engine asks the backend for those rows."""
        ...

    @property
    def most(self) -> int:
        """The most drafts that it makes of one sequence in one round."""
        ...

    @property
    def position_bytes(self) -> int:
        """What a saved state takes per token."""
        ...

    def follow(self, computed: Sequence[Computed]) -> None:
        """The target has computed these, in a round of the class in which this is called.

        A prompt's rows are worked on at once, so that it is done in a prefill round; a few
        generated ones may wait until drafts are wanted.  Raises Aborted, BackendError: the slots'
        states then lag.
        """
        ...

    def propose(self, wishes: Sequence[Wish]) -> list[tuple[int, ...]]:
        """How each sequence may go on, at most `count` tokens; () where nothing comes to mind.

        All slots of a round at once, so that a network runs once per draft position, not once per
        slot.  Raises Aborted, BackendError; the round then goes on without drafts.
        """
        ...

    def truncate(self, slot: SlotIndex, length: int) -> None:
        """The slot's sequence was cut to its first `length` tokens; 0 forgets it."""
        ...

    def fork(self, source: SlotIndex, target: SlotIndex, length: int) -> None:
        """The first `length` tokens of `source` are now those of `target`, whose own are gone."""
        ...

    def save(self, slot: SlotIndex, length: int) -> Followed | None:
        """The state of the slot's first `length` tokens; None where it is not worth a copy."""
        ...

    def restore(self, slot: SlotIndex, state: Followed | None, length: int) -> None:
        """The slot holds the first `length` tokens of those saved with this state, or without."""
        ...

    def shift(self, slot: SlotIndex, start: int, count: int) -> None:
        """`count` tokens from `start` were dropped from the slot's sequence."""
        ...

    def abort(self) -> None:
        """From any thread: as Backend.abort."""
        ...

    def resume(self) -> None:
        """As Backend.resume."""
        ...

    def close(self) -> None: ...


class NoDrafts:
    """Implements Drafter where nothing is to be guessed."""

    name = "none"
    wants_hidden = False
    most = 0
    position_bytes = 0

    def follow(self, computed: Sequence[Computed]) -> None: ...

    def propose(self, wishes: Sequence[Wish]) -> list[tuple[int, ...]]:
        return [()] * len(wishes)

    def truncate(self, slot: SlotIndex, length: int) -> None: ...

    def fork(self, source: SlotIndex, target: SlotIndex, length: int) -> None: ...

    def save(self, slot: SlotIndex, length: int) -> Followed | None:
        return None

    def restore(self, slot: SlotIndex, state: Followed | None, length: int) -> None: ...

    def shift(self, slot: SlotIndex, start: int, count: int) -> None: ...

    def abort(self) -> None: ...

    def resume(self) -> None: ...

    def close(self) -> None: ...
