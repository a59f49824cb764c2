"""From rows of logits to tokens, for the lanes of a model engine's round.

A lane with drafts has a row for each of them.  Its tokens are drawn one after the other, each as if
it had been computed alone, from the row of the one before: as long as what is drawn is what was
guessed, the next row is already there.
"""

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from phaseloop.core.vocabulary import Failed, Lane, Produced, Result

from .cpu_slot import Logits, Slot
from .protocol import EngineDied
from .sampler import Draw, Sampled, Sampler
from .settings import Likelihood


class Drawn(Struct, frozen=True):
    """What a lane of a round came to."""

    result: Result = Produced()
    ids: tuple[int, ...] = ()
    likelihoods: tuple[Likelihood, ...] = ()
    drafted: int = 0  # drafts that were verified for it


NOTHING = Drawn()


def refused(reason: str) -> Drawn:
    return Drawn(Failed(reason))


class Check(Struct, frozen=True):
    """A lane whose pending token and drafts were computed; the slot holds the former."""

    lane: Lane
    slot: Slot
    drafts: tuple[int, ...]
    rows: Logits  # [1 + drafts, vocabulary]
    is_cold: bool  # whether these rows have a prompt's bits
    start: int  # of the pass that computed them


class Draws:
    """`end_tokens` end a text; they are not delivered."""

    def __init__(self, sampler: Sampler, end_tokens: frozenset[int]) -> None:
        self._sampler = sampler
        self._end_tokens = end_tokens

    def draw(self, lanes: Sequence[Lane], slots: Sequence[Slot]) -> list[Drawn]:
        """A token per lane from its slot's logits; it becomes the pending one, or ends the text."""
        if not lanes:
            return []
        logits = stacked([slot.logits for slot in slots])
        draws = [
            Draw(lane.request_id, lane.choice, slot.seed, slot.position, slot.tokens, slot.sampling)
            for lane, slot in zip(lanes, slots, strict=True)
        ]
        return [
            self._take(slot, sampled)
            for slot, sampled in zip(slots, self._sampler.sample(logits, draws), strict=True)
        ]

    def verify(self, checks: Sequence[Check]) -> list[Drawn]:
        """A token per lane, and one more per draft that holds.  The slots take those as computed.

        A draft holds if it is the token that was drawn, and did not end the text.
        """
        found = [NOTHING] * len(checks)
        going = list(range(len(checks)))
        depth = 0
        while going:
            for index in going:
                checks[index].slot.logits = checks[index].rows[depth]
            lanes = [checks[index].lane for index in going]
            drawn = self.draw(lanes, [checks[index].slot for index in going])
            for index, one in zip(going, drawn, strict=True):
                found[index] = joined(found[index], one)
            going = [
                index
                for index, one in zip(going, drawn, strict=True)
                if one.ids and one.ids == checks[index].drafts[depth : depth + 1]
            ]
            for index in going:
                check = checks[index]
                check.slot.append((check.drafts[depth],), cold=check.is_cold)
            depth += 1
        for check in checks:
            if check.drafts and check.slot.logits is not None:
                check.slot.logits = check.slot.logits.copy()  # so that the other rows can go
        return [
            replace(one, drafted=len(check.drafts))
            for one, check in zip(found, checks, strict=True)
        ]

    def _take(self, slot: Slot, sampled: Sampled) -> Drawn:
        token, likelihood = sampled.token, sampled.likelihood
        if token is None:
            return refused("the logits allow no token: each is ruled out, or one is not a number")
        slot.pending = token
        if token in self._end_tokens:
            return Drawn(Produced(0, True))
        return Drawn(Produced(1), (token,), () if likelihood is None else (likelihood,))


def joined(before: Drawn, after: Drawn) -> Drawn:
    if not isinstance(before.result, Produced) or not isinstance(after.result, Produced):
        return after
    return Drawn(
        Produced(before.result.tokens + after.result.tokens, after.result.finish),
        before.ids + after.ids,
        before.likelihoods + after.likelihoods,
    )


def stacked(rows: Sequence[NDArray[np.float32] | None]) -> NDArray[np.float32]:
    if any(row is None for row in rows):
        raise EngineDied("a sequence lost its logits between prefill and sampling")
    return np.stack([row for row in rows if row is not None])
