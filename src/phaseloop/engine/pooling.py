"""What is made of a prompt's rows, in whatever parts they come: the same bits for any cut.

none   all of them, as they are
mean   their mean, summed up one after the other in float64
cls    the first
last   the last
rank   a classifier's scores of one row: of the first where rows see each other, else the last
"""

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from .settings import Pooling, Vectors

Rows = NDArray[np.float32]


class Pooled(Struct, frozen=True):
    """How: see above.  `looks_ahead`: the first row has seen all; `shares`: scores add up to 1."""

    pooling: Pooling
    looks_ahead: bool
    shares: bool = False

    def outputs(self, start: int, count: int, prompt_length: int) -> int:
        """How many of the last rows of a prompt's part are of use."""
        if self.pooling in ("none", "mean"):
            return count
        if self._takes_first:
            return count if start == 0 else 0  # rows are counted from the end
        return int(start + count == prompt_length)

    @property
    def _takes_first(self) -> bool:
        return self.pooling == "cls" or (self.pooling == "rank" and self.looks_ahead)

    def taken(self, pool: "Pool", rows: Rows) -> None:
        """Add the rows of a part, those that `outputs` said."""
        if not len(rows):
            return
        if self.pooling == "none":
            pool.parts.append(rows)
        elif self.pooling == "mean":
            total = pool.total if pool.count else np.zeros(rows.shape[1])
            for row in rows:
                total = total + row
            pool.total, pool.count = total, pool.count + len(rows)
        elif not pool.parts:
            pool.parts.append(rows[:1])

    def made(self, pool: "Pool") -> Vectors | None:
        """Of a whole prompt; None where a value is not a number."""
        if self.pooling == "mean":
            rows = (pool.total / pool.count)[None]
        else:
            rows = np.concatenate(pool.parts)
        if self.shares and self.pooling == "rank":
            raised = np.exp(rows.astype(np.float64) - rows.max())
            rows = raised / raised.sum()
        rows = np.ascontiguousarray(rows, np.dtype("<f4"))
        return Vectors(rows.shape[1], rows.tobytes()) if np.isfinite(rows).all() else None


class Pool:
    """What a prompt's rows have come to so far."""

    def __init__(self) -> None:
        self.parts: list[Rows] = []
        self.total: NDArray[np.float64] = np.zeros(0)
        self.count = 0
