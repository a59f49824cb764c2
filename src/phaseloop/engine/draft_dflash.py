"""Drafts by DFlash: a block of masks, all of them filled in one pass.

The drafter reads the target's hidden rows at the inputs of several layers: a prompt's in the
prefill rounds that computed them, generated ones when drafts are wanted.  They are its keys and
values at the positions of their tokens; the block itself leaves nothing behind.
"""

from collections.abc import Sequence

import numpy as np

from phaseloop.model.draft import Draft
from phaseloop.ops.ggml import UBATCH_ROWS_MIN
from phaseloop.ops.interface import HiddenBackend, Rows, Span

from .draft import Computed, Wish
from .draft_model import Going, draw_of, take
from .draft_track import Track, Tracks
from .sampler import Sampler

ROWS_MAX = UBATCH_ROWS_MIN  # of one pass: a block must not be cut


def drafts_of(draft: Draft, most: int) -> int:
    """How many masks a block has: no more than it was trained with, or than go into a pass."""
    return min(most, draft.block_length - 1, ROWS_MAX - 1)


class DflashDrafter(Tracks):
    """Implements draft.Drafter."""

    name = "draft-dflash"
    wants_hidden = True

    def __init__(
        self,
        backend: HiddenBackend,
        sampler: Sampler,
        draft: Draft,
        *,
        slot_count: int,
        context_length: int,
        most: int,
        end_tokens: frozenset[int],
    ) -> None:
        super().__init__(backend, slot_count=slot_count, width=draft.dimensions.given_width)
        self.most = drafts_of(draft, most)
        self._sampler = sampler
        self._mask = draft.mask
        self._token_ids = None if draft.token_ids is None else np.array(draft.token_ids)
        self._vocabulary = draft.dimensions.vocabulary
        self._context_length = context_length
        self._end_tokens = end_tokens

    def _with(self, one: Computed, hidden: Rows) -> Track:
        return self.meet(one.slot, one.start).wait(one.sequence[one.start :], hidden)

    def propose(self, wishes: Sequence[Wish]) -> list[tuple[int, ...]]:
        going: list[Going] = []
        for wish in wishes:
            track, sequence = self.track(wish.slot), list(wish.draw.tokens)
            if track.length and track.length + 1 == len(sequence):
                going.append(Going(wish, sequence, min(wish.count, self.most), []))
        self.read([one.wish.slot for one in going if self.track(one.wish.slot).waiting])
        together = max(1, ROWS_MAX // (1 + self.most))
        for first in range(0, len(going), together):
            self._fill(going[first : first + together])
        found = {one.wish.slot: one.drafts for one in going}
        return [tuple(found.get(wish.slot, ())) for wish in wishes]

    def _fill(self, going: Sequence[Going]) -> None:
        spans = [self._block(one) for one in going]
        logits = self._backend.forward(spans)
        first = 0
        drawing: list[tuple[Going, Rows]] = []
        for one, span in zip(going, spans, strict=True):
            drawing.append((one, logits[first : first + span.outputs]))
            first += span.outputs
        depth = 0
        while drawing:
            rows = self._spread(np.stack([rows[depth] for _, rows in drawing]))
            sampled = self._sampler.sample(rows, [draw_of(one) for one, _ in drawing])
            drawing = [
                pair
                for pair, drawn in zip(drawing, sampled, strict=True)
                if take(pair[0], drawn, self._vocabulary, self._end_tokens)
            ]
            depth += 1

    def _block(self, one: Going) -> Span:
        """As many masks as it is used to, wanted or not, as far as the context goes."""
        start = self.track(one.wish.slot).held
        masks = max(one.count, min(self.most, self._context_length - start - 1))
        tokens = (one.sequence[-1], *(self._mask,) * masks)
        return Span(one.wish.slot, start, tokens, masks, True)

    def _spread(self, rows: Rows) -> Rows:
        """Logits over the target's tokens; those that the drafter does not know are ruled out."""
        if self._token_ids is None:
            return rows
        found = np.full((len(rows), self._vocabulary), -np.inf, np.float32)
        found[:, self._token_ids] = rows
        return found
