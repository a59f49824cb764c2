"""DRY, "don't repeat yourself": the penalty for tokens that would go on with a repetition.

If the end of the sequence has occurred before, the token that followed there would make the
repetition longer; the longer it is by then, the lower its logit becomes.  The steps are those of
llama.cpp (build 11434, src/llama-sampler.cpp), whose authors took them from koboldcpp.
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from .sampling_candidates import CEILING, Candidates
from .sampling_steps import last
from .settings import Breaker, Sampling

Tails: TypeAlias = dict[int, list[tuple[int, ...]]]  # by head

FLOAT32_MAX_LOG = 88.7228391  # where llama.cpp's powers would leave float32
TABLES = 16


class BreakerTables:
    """The breakers by head, kept for those used last.

    They are found by identity: a request's are thousands, the same object at every token, and to
    hash or to sort them anew takes longer than the whole draw.
    """

    def __init__(self) -> None:
        self._tables: dict[int, tuple[tuple[Breaker, ...], Tails]] = {}

    def __call__(self, breakers: tuple[Breaker, ...]) -> Tails:
        kept = self._tables.pop(id(breakers), None)
        if kept is None:
            kept = breakers, by_head(breakers)
            if len(self._tables) == TABLES:
                del self._tables[next(iter(self._tables))]
        self._tables[id(breakers)] = kept  # whose reference keeps the id from being used again
        return kept[1]


def by_head(breakers: tuple[Breaker, ...]) -> Tails:
    tails: Tails = {}
    for breaker in breakers:
        tails.setdefault(breaker.head, []).append(breaker.tail)
    return tails


def dry_applies(sampling: Sampling) -> bool:
    return (
        sampling.dry_multiplier != 0.0
        and sampling.dry_base >= 1.0
        and sampling.dry_penalty_last_n != 0
    )


def dry(
    candidates: Candidates, sampling: Sampling, tokens: Sequence[int], tables: BreakerTables
) -> None:
    """Subtract multiplier * base ** (length - allowed length) for repetitions of that length on.

    The time is linear in `dry_penalty_last_n`, about 0.2 µs per token.
    """
    if not dry_applies(sampling):
        return
    window = last(tokens, sampling.dry_penalty_last_n)
    allowed, tails = sampling.dry_allowed_length, tables(sampling.dry_breakers)
    lengths = {
        token: length
        for token, length in continuations(window, reach(window, tails), allowed).items()
        if 0 <= token < candidates.vocabulary and () not in tails.get(token, ())
    }
    if not lengths:
        return
    exponents = np.fromiter(lengths.values(), np.float64, len(lengths)) - allowed
    if sampling.dry_base > 1.000001:
        exponents = np.minimum(exponents, int(FLOAT32_MAX_LOG / np.log(sampling.dry_base)))
    table = np.zeros(candidates.vocabulary)
    table[list(lengths)] = np.clip(
        sampling.dry_multiplier * np.power(sampling.dry_base, exponents), -CEILING, CEILING
    )
    penalty = candidates.look_up(table)
    hit = np.flatnonzero(penalty)
    candidates.change(hit, candidates.logits[hit] - penalty[hit])


def reach(window: Sequence[int], tails: Tails) -> int:
    """How many tokens at the end a repetition may have: those after the last breaker.

    The breaker's head is looked for from the end; where several tails fit behind it, the longest
    counts.
    """
    for back in range(len(window)):
        at = len(window) - 1 - back
        fitting = [
            len(tail)
            for tail in tails.get(window[at], ())
            if tuple(window[at + 1 : at + 1 + len(tail)]) == tail
        ]
        if fitting:
            return back - max(fitting)
    return len(window)


def continuations(window: Sequence[int], limit: int, allowed: int) -> dict[int, int]:
    """By token that has followed: the length of the longest end of the window it followed upon.

    Lengths are cut to `limit`; those below `allowed` are left out.
    """
    longest: dict[int, int] = {}
    for back, shared in enumerate(common_prefixes(window[::-1])):
        length = min(shared, limit)
        if back and length >= allowed:
            token = window[len(window) - back]
            longest[token] = max(length, longest.get(token, 0))
    return longest


def common_prefixes(tokens: Sequence[int]) -> list[int]:
    """At each place, how many tokens from there on equal those from the beginning on.

    The Z-algorithm: [left, right) is the match that reaches farthest; what lies within it was
    compared before, as part of the beginning.
    """
    count = len(tokens)
    lengths = [count] + [0] * (count - 1)
    left = right = 0
    for start in range(1, count):
        length = min(right - start, lengths[start - left]) if start < right else 0
        while start + length < count and tokens[length] == tokens[start + length]:
            length += 1
        if start + length > right:
            left, right = start, start + length
        lengths[start] = length
    return lengths
