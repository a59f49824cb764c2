"""A round's rows, put together from the passes it was cut into."""

import itertools
from collections.abc import Sequence

import numpy as np

from .interface import Rows, Span
from .passes import Pass


class Gathered:
    """Logits in lane order, and hidden rows, as many as tokens, if there are any."""

    def __init__(self, spans: Sequence[Span], vocabulary: int) -> None:
        ends = list(itertools.accumulate(span.outputs for span in spans))
        self.logits: Rows = np.empty((ends[-1], vocabulary), np.float32)
        self.hidden: Rows | None = None
        self._spans = spans
        self._next = [end - span.outputs for end, span in zip(ends, spans, strict=True)]
        rows = list(itertools.accumulate(len(span.tokens) for span in spans))
        self._first = [end - len(span.tokens) for end, span in zip(rows, spans, strict=True)]
        self._rows = rows[-1]

    def take(self, one: Pass, logits: Rows, hidden: Sequence[Rows]) -> None:
        """The rows of a pass, piece by piece; copies them."""
        row = output = 0
        if hidden and self.hidden is None:
            width = sum(part.shape[1] for part in hidden)
            self.hidden = np.empty((self._rows, width), np.float32)
        for lane, piece in zip(one.lanes, one.pieces, strict=True):
            place, outputs, count = self._next[lane], piece.outputs, len(piece.tokens)
            self.logits[place : place + outputs] = logits[output : output + outputs]
            self._next[lane] += outputs
            if self.hidden is not None:
                first = self._first[lane] + piece.start - self._spans[lane].start
                shown = [part[row : row + count] for part in hidden]
                np.concatenate(shown, axis=1, out=self.hidden[first : first + count])
            row, output = row + count, output + outputs
