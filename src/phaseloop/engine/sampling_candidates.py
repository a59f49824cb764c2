"""What is left of the vocabulary while one row of logits is sampled, and how its best are found.

All of it works on one row alone, so nothing here can know of a row's neighbours.  Sums run over
fresh contiguous arrays, whose length depends on the row alone, so their bits do too.
"""

from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Positions: TypeAlias = NDArray[np.intp]
Floats: TypeAlias = NDArray[np.floating[Any]]

FIRST_LOOK = 256  # candidates that are sorted before it is known how many are needed
CHUNKS_EACH = 64  # elements of which `leading` takes the maximum, to find a bound
CEILING = 1e30  # of what biases and penalties may make of a logit; float64 can square it


class Candidates:
    """The tokens that may still be drawn, with their logits.

    They are in one of two orders: by id, or, if `ranked`, by logit from the top, equals by id.
    Logits are finite.  What a step rules out is dropped, but `counted` goes on counting those whose
    logit became minus infinity, as llama.cpp does: it is what a dynamic temperature and `min_keep`
    go by.
    """

    def __init__(self, row: Floats) -> None:
        """`row` [vocabulary] has finite values, and minus infinity for tokens ruled out."""
        self.vocabulary = self.counted = len(row)
        self.ids = all_ids(len(row))
        self.logits = row
        self.ranked = False
        if np.isneginf(row.min()):
            self.drop_below(-np.finfo(np.float64).max)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def top(self) -> float:
        """The highest logit."""
        return float(self.logits[0] if self.ranked else self.logits.max())

    def best(self, count: int) -> Positions:
        """Where the `count` best are, from the top, equals by id; all if there are fewer."""
        if self.ranked:
            return np.arange(min(count, len(self)))
        return leading(self.logits, count)

    def keep_best(self, count: int) -> None:
        self.keep(self.best(count), counted=count, ranked=True)

    def keep(self, positions: Positions, *, counted: int, ranked: bool | None = None) -> None:
        """Drop all others.  The positions ascend, or `ranked` says what their order is."""
        self.ids, self.logits = self.ids[positions], self.logits[positions]
        self.counted = max(len(self.ids), min(counted, self.counted))
        self.ranked = self.ranked if ranked is None else ranked

    def drop_below(self, logit: float) -> None:
        """Rule out what has less; it stays counted."""
        self.keep(np.flatnonzero(self.logits >= logit), counted=self.counted)

    def look_up(self, table: NDArray[Any]) -> NDArray[Any]:
        """Of a table over the vocabulary, the entries of the candidates."""
        return table if len(self) == self.vocabulary and not self.ranked else table[self.ids]

    def change(self, positions: Positions, logits: Floats) -> None:
        """Give some candidates other logits."""
        self.logits = self.logits.astype(np.float64)
        self.logits[positions] = np.clip(logits, -CEILING, CEILING)
        if self.ranked:
            by_id = np.argsort(self.ids)
            self.ids, self.logits, self.ranked = self.ids[by_id], self.logits[by_id], False

    def weights(self) -> tuple[NDArray[np.float64], float]:
        """Probabilities but for their sum, which comes with them; the likeliest has 1."""
        weights = np.exp(self.logits.astype(np.float64) - self.top)
        return weights, float(weights.sum())

    def log_probabilities(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Natural logarithms, and the probabilities."""
        weights, total = self.weights()
        return self.logits.astype(np.float64) - self.top - np.log(total), weights / total

    def likeliest(self, share: float, *, at_least: int = 0) -> Positions:
        """Where the fewest are that have that share of the probability, from the top."""
        weights, total = self.weights()
        if not self.ranked:
            return leading_until(self.logits, weights, share * total, at_least=at_least)
        count = max(count_up(weights, share * total), at_least)
        return np.arange(min(count, len(self)))


@lru_cache(maxsize=4)
def all_ids(count: int) -> Positions:
    ids = np.arange(count)
    ids.flags.writeable = False  # shared by all rows
    return ids


def leading(values: Floats, count: int) -> Positions:
    """Where the `count` highest values are, from the top; of equals, the first ones first.

    To sort a whole vocabulary takes milliseconds.  As the maxima of disjoint parts are values
    themselves, at least `count` values reach the `count`-th highest maximum: what is below it can
    be left out.  Which values form a part decides how much is left to sort, never the result.
    """
    count = min(count, len(values))
    if count <= 0:
        return np.arange(0)
    width = len(values) // CHUNKS_EACH
    if count == len(values):
        pool = None
    elif count <= width:
        maxima = values[: width * CHUNKS_EACH].reshape(CHUNKS_EACH, width).max(axis=0)
        pool = np.flatnonzero(values >= np.partition(maxima, width - count)[width - count])
    else:
        bound = np.partition(values, len(values) - count)[len(values) - count]
        pool = np.flatnonzero(values >= bound)
    if pool is None:
        return np.argsort(-values, kind="stable")
    return pool[np.argsort(-values[pool], kind="stable")[:count]]


def leading_until(
    values: Floats, weights: NDArray[np.float64], target: float, *, at_least: int = 0
) -> Positions:
    """Where the highest values are, as many as it takes for their weights to reach the target."""
    looked_at = max(FIRST_LOOK, at_least)
    while True:
        order = leading(values, looked_at)
        ordered = weights[order]
        if len(order) == len(values) or float(ordered.cumsum()[-1]) >= target:
            return order[: max(count_up(ordered, target), at_least)]
        looked_at *= 8


def count_up(weights: NDArray[np.float64], target: float) -> int:
    """How many it takes for the sum of the first weights to reach the target, at least one.

    Where rounding leaves the whole sum below it: as many as add anything.
    """
    sums = weights.cumsum()
    return int(sums.searchsorted(min(target, sums[-1]))) + 1
