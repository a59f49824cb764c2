"""Drafts by a smaller model: it reads what the target reads, and says how it would go on.

It has a KV region per slot.  A prompt's rows it computes in the same prefill rounds as the target;
what was generated since it reads when drafts are wanted, all slots in one pass, and then draws
token by token.  It draws as the target will, with the same settings, the same random numbers at the
same positions: so a model that agrees with the target guesses right at any temperature, and the
target itself would guess every token.

Rejected drafts are cut off.  A recurrent state cannot be cut: it is marked where the drafts begin,
and goes back to there.
"""

import math
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from phaseloop.core.vocabulary import SlotIndex
from phaseloop.ops.interface import Backend, Rows, Snapshot, Span

from .draft import Computed, Followed, Wish
from .reuse import reachable
from .sampler import Draw, Sampled, Sampler

LAG_MAX = 64  # tokens; more are made good in one go only in a prefill round


class Read(Struct, frozen=True):
    """Implements draft.Followed: the first tokens that the model has read, and their state."""

    tokens: tuple[int, ...]
    cells: Snapshot

    @property
    def size_bytes(self) -> int:
        return self.cells.size_bytes


class Reader:
    """What the model has read of one slot: `tokens`, of which the first `agreed` are the slot's.

    A token that only the target knows is read as another one: drafts are guesses anyway.
    """

    def __init__(self, vocabulary: int) -> None:
        self._last = vocabulary - 1
        self.tokens: list[int] = []
        self.agreed = 0

    def agree(self, sequence: Sequence[int]) -> int:
        """How many of a sequence's first tokens were read; its first `agreed` are as they were."""
        place = self.agreed
        end = min(len(self.tokens), len(sequence))
        while place < end and self.tokens[place] == min(sequence[place], self._last):
            place += 1
        self.agreed = place
        return place

    def legible(self, tokens: Sequence[int]) -> tuple[int, ...]:
        return tuple(min(token, self._last) for token in tokens)

    def cut(self, length: int) -> None:
        del self.tokens[length:]
        self.agreed = min(self.agreed, length)

    def read(self, tokens: Sequence[int], start: int, *, agreed: bool) -> None:
        self.tokens[start:] = tokens
        if agreed:
            self.agreed = len(self.tokens)


class Going(Struct):
    """A slot that drafts are being drawn for."""

    wish: Wish
    sequence: list[int]  # with its drafts
    count: int
    drafts: list[int]


class DraftModel:
    """Implements draft.Drafter.  Owns its backend, whose regions are the slots."""

    name = "draft-simple"
    wants_hidden = False

    def __init__(
        self,
        backend: Backend,
        sampler: Sampler,
        *,
        slot_count: int,
        most: int,
        context_length: int,
        vocabulary: int,
        target_vocabulary: int,
        end_tokens: frozenset[int],
    ) -> None:
        """Behind `context_length` it drafts nothing.

        It has `vocabulary` tokens, and the target `target_vocabulary`; either may be padded.
        """
        self.most = most
        self._backend = backend
        self._sampler = sampler
        self._readers = [Reader(vocabulary) for _ in range(slot_count)]
        self._context_length = context_length
        self._target_vocabulary = target_vocabulary
        self._end_tokens = end_tokens

    @property
    def position_bytes(self) -> int:
        return self._backend.position_bytes

    # --- reading ----------------------------------------------------------------------------------

    def follow(self, computed: Sequence[Computed]) -> None:
        """A prompt's rows at once; generated ones wait until drafts are wanted."""
        spans: list[Span] = []
        for one in computed:
            end = len(one.sequence)
            if one.generated or end > self._context_length:
                continue
            start = self._cut(one.slot, one.sequence, end)
            if start < end:
                tokens = self._readers[one.slot].legible(one.sequence[start:end])
                spans.append(Span(one.slot, start, tokens, 0, False, (end,)))
        if not spans:
            return
        self._forward(spans, agreed=True)

    def _forward(self, spans: Sequence[Span], *, agreed: bool) -> Rows:
        try:
            logits = self._backend.forward(spans)
        except Exception:
            for span in spans:  # what was written is anything
                self._backend.truncate(span.region, span.start)
            raise
        for span in spans:
            self._readers[span.region].read(span.tokens, span.start, agreed=agreed)
        return logits

    def _cut(self, slot: SlotIndex, sequence: Sequence[int], most: int) -> int:
        """Go back to where the sequence and what was read part, or to `most`; say where that is."""
        reader = self._readers[slot]
        start = min(reader.agree(sequence), most)
        if start < len(reader.tokens):
            start = reachable(start, self._backend.positions(slot))
            self._backend.truncate(slot, start)
            reader.cut(start)
        return start

    # --- drafting ---------------------------------------------------------------------------------

    def propose(self, wishes: Sequence[Wish]) -> list[tuple[int, ...]]:
        spans: list[Span] = []
        drawing: list[Going] = []
        for wish in wishes:
            sequence = list(wish.draw.tokens)
            end = len(sequence)
            count = min(wish.count, self._context_length - end)
            if count <= 0:
                continue
            start = self._cut(wish.slot, sequence, end - 1)
            stop = min(end, start + LAG_MAX)
            tokens = self._readers[wish.slot].legible(sequence[start:stop])
            spans.append(Span(wish.slot, start, tokens, int(stop == end), True, (stop,)))
            if stop == end:
                drawing.append(Going(wish, sequence, count, []))
        found = {one.wish.slot: one.drafts for one in drawing}
        self._draw(spans, drawing)
        return [tuple(found.get(wish.slot, ())) for wish in wishes]

    def _draw(self, spans: Sequence[Span], going: list[Going]) -> None:
        """A draft for each, then those of them that want another; `spans` lead to the first."""
        is_first = True
        while spans:
            logits = self._forward(spans, agreed=is_first)
            is_first = False
            draws = [draw_of(one) for one in going]
            sampled = self._sampler.sample(logits, draws) if draws else []
            going = [
                one
                for one, drawn in zip(going, sampled, strict=True)
                if take(one, drawn, self._target_vocabulary, self._end_tokens)
            ]
            spans = [
                Span(one.wish.slot, len(one.sequence) - 1, (one.sequence[-1],), 1, True)
                for one in going
            ]

    # --- with its slot ----------------------------------------------------------------------------

    def truncate(self, slot: SlotIndex, length: int) -> None:
        reader = self._readers[slot]
        if length < len(reader.tokens) or not length:
            self._backend.truncate(slot, length)
        reader.cut(length)

    def fork(self, source: SlotIndex, target: SlotIndex, length: int) -> None:
        self.truncate(target, 0)
        read = self._readers[source]
        length = reachable(min(read.agreed, length), self._backend.positions(source))
        self._backend.copy(source, target, length)
        self._readers[target].read(read.tokens[:length], 0, agreed=True)

    def save(self, slot: SlotIndex, length: int) -> Read | None:
        reader = self._readers[slot]
        length = reachable(min(reader.agreed, length), self._backend.positions(slot))
        if not length:
            return None
        return Read(tuple(reader.tokens[:length]), self._backend.save(slot, length))

    def restore(self, slot: SlotIndex, state: Followed | None, length: int) -> None:
        self.truncate(slot, 0)
        if not isinstance(state, Read):
            return
        length = reachable(min(len(state.tokens), length), state.cells.positions)
        self._backend.restore(slot, state.cells.first(length))
        self._readers[slot].read(state.tokens[:length], 0, agreed=True)

    def shift(self, slot: SlotIndex, start: int, count: int) -> None:
        reader = self._readers[slot]
        self.truncate(slot, reader.agreed)
        if reader.agreed < start + count or self._backend.state_bytes:
            self.truncate(slot, start)
            return
        self._backend.shift(slot, start, count, reader.agreed)
        del reader.tokens[start : start + count]
        reader.agreed -= count

    def abort(self) -> None:
        self._backend.abort()

    def resume(self) -> None:
        self._backend.resume()

    def close(self) -> None:
        self._backend.close()


def draw_of(one: Going) -> Draw:
    """As the target will draw at this place, told how likely it was where that decides."""
    draw, drafted = one.wish.draw, len(one.drafts)
    probs = 1 if one.wish.p_min > 0.0 else 0
    sampling = replace(draw.sampling, n_probs=probs, post_sampling_probs=False)
    return replace(draw, position=draw.position + drafted, tokens=one.sequence, sampling=sampling)


def take(one: Going, drawn: Sampled, vocabulary: int, end_tokens: frozenset[int]) -> bool:
    """Add a draft of a target that has `vocabulary` tokens; whether another is wanted behind it."""
    token, likelihood = drawn.token, drawn.likelihood
    if token is None or token >= vocabulary:
        return False
    if likelihood is not None and math.exp(likelihood.chosen) < one.wish.p_min:
        return False
    one.drafts.append(token)
    one.sequence.append(token)
    return token not in end_tokens and len(one.drafts) < one.count
