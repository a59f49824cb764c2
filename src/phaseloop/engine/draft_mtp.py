"""Drafts by the block for multi-token prediction: from the target's final rows, and then its own.

The block reads a token beside the final row of the token before it; so the rows that the target
shows are one place behind, and the last one waits for the token that is drawn next.  It goes on
from its own draft with its own final row, which is why its drafts get worse with every one.

A prompt's rows it reads in the prefill rounds that computed them.  It draws as the target will,
with the same settings and the same random numbers at the same positions.
"""

from collections.abc import Sequence

import numpy as np

from phaseloop.ops.interface import HiddenBackend, Rows, Span

from .draft import Computed, Wish
from .draft_model import Going, draw_of, take
from .draft_track import Track, Tracks
from .sampler import Sampler


class MtpDrafter(Tracks):
    """Implements draft.Drafter."""

    name = "draft-mtp"
    wants_hidden = True

    def __init__(
        self,
        backend: HiddenBackend,
        sampler: Sampler,
        *,
        slot_count: int,
        width: int,
        most: int,
        vocabulary: int,
        end_tokens: frozenset[int],
    ) -> None:
        """`width` is the target's, and so the block's own."""
        super().__init__(backend, slot_count=slot_count, width=width)
        self.most = most
        self._sampler = sampler
        self._vocabulary = vocabulary
        self._end_tokens = end_tokens

    def _with(self, one: Computed, hidden: Rows) -> Track:
        """Each token beside the row of the one before."""
        track = self.meet(one.slot, one.start)
        carry = np.zeros_like(hidden[0]) if track.carry is None else track.carry
        tokens = one.sequence[one.start :]
        track = track.wait(tokens, np.concatenate((carry[None], hidden[:-1])))
        return track.learn(hidden[-1], generated=one.generated)

    def propose(self, wishes: Sequence[Wish]) -> list[tuple[int, ...]]:
        going: list[Going] = []
        spans: list[Span] = []
        for wish in wishes:
            track, sequence = self._tracks[wish.slot], list(wish.draw.tokens)
            if track.length + 1 != len(sequence) or track.carry is None:
                continue  # it has not seen the last row, and nothing can be drafted without
            track = track.wait(sequence[-1:], track.carry[None])
            spans.append(Span(wish.slot, track.held, track.waiting, 1, True, given=track.given))
            going.append(Going(wish, sequence, wish.count, []))
        found = {one.wish.slot: one.drafts for one in going}
        starts = {one.wish.slot: self._tracks[one.wish.slot] for one in going}
        while going:
            logits, hidden = self._backend.forward_hidden(spans)
            for slot, track in starts.items():
                self._tracks[slot] = track.settle()
            starts = {}
            going, spans = self._next(going, spans, logits, hidden)
        return [tuple(found.get(wish.slot, ())) for wish in wishes]

    def _next(
        self, going: Sequence[Going], spans: Sequence[Span], logits: Rows, hidden: Rows
    ) -> tuple[list[Going], list[Span]]:
        """Take a draft for each; who wants another, and the lanes that lead there."""
        sampled = self._sampler.sample(logits, [draw_of(one) for one in going])
        still: list[Going] = []
        lanes: list[Span] = []
        end = 0
        for one, span, drawn in zip(going, spans, sampled, strict=True):
            end += len(span.tokens)
            if not take(one, drawn, self._vocabulary, self._end_tokens):
                continue
            still.append(one)
            start = span.start + len(span.tokens)
            lanes.append(
                Span(span.region, start, one.sequence[-1:], 1, True, given=hidden[end - 1 : end])
            )
        return still, lanes
