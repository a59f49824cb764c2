"""When drafts are asked for, how many, and what is learnt from those that held."""

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from msgspec import Struct

from phaseloop.core.vocabulary import Lane
from phaseloop.ops.interface import Aborted, BackendError

from .cpu_draws import Check
from .cpu_slot import Slot
from .draft import Computed, Drafter, Wish
from .sampler import Draw

Found = TypeVar("Found")
Number = TypeVar("Number", int, float)
log = logging.getLogger(__name__)

COST = 0.25  # of a draft more, where nobody measured it


class Terms(Struct, frozen=True):
    """What holds for requests that say nothing, and what a draft costs.

    `cost` is the time that one draft more takes, to make and to verify, as a part of a round
    without any.
    """

    n_min: int = 0
    p_min: float = 0.0
    cost: float = COST


USUAL = Terms()


class Speculator:
    """One engine's drafter, and how it is used."""

    def __init__(self, drafter: Drafter, terms: Terms) -> None:
        self.drafter = drafter
        self._terms = terms

    def propose(self, lanes: Sequence[Lane], slots: Sequence[Slot]) -> list[tuple[int, ...]]:
        """Drafts for each lane; () for one that has no pending token, or does better without."""
        found: list[tuple[int, ...]] = [()] * len(lanes)
        wishes: list[Wish] = []
        places: list[int] = []
        for place, (lane, slot) in enumerate(zip(lanes, slots, strict=True)):
            if slot.pending is None or lane.count == 1:
                continue
            count = self._count(slot, lane.count - 1)
            if count:
                wishes.append(self._wish(lane, slot, count, slot.pending))
                places.append(place)
            else:
                slot.width = slot.width.without()
        if not wishes:
            return found
        proposed = self._quietly(lambda: self.drafter.propose(wishes)) or [()] * len(wishes)
        for place, drafts in zip(places, proposed, strict=True):
            if len(drafts) >= or_else(slots[place].content.speculation.n_min, self._terms.n_min):
                found[place] = drafts
        return found

    def learn(self, check: Check, accepted: int) -> None:
        if check.drafts:
            check.slot.width = check.slot.width.after(len(check.drafts), accepted)

    def follow(self, computed: Sequence[Computed]) -> None:
        if computed:
            self._quietly(lambda: self.drafter.follow(computed))

    def _count(self, slot: Slot, most: int) -> int:
        most = min(most, self.drafter.most)
        most = min(most, or_else(slot.content.speculation.n_max, most))
        return slot.width.drafts(most, self._terms.cost)

    def _wish(self, lane: Lane, slot: Slot, count: int, pending: int) -> Wish:
        tokens = [*slot.tokens, pending]
        position = slot.position + 1
        return Wish(
            slot.region,
            count,
            or_else(slot.content.speculation.p_min, self._terms.p_min),
            Draw(lane.request_id, lane.choice, slot.seed, position, tokens, slot.sampling),
        )

    def _quietly(self, call: Callable[[], Found]) -> Found | None:
        """Drafts are worth no failed round: without them it goes on as it would have anyway."""
        try:
            return call()
        except Aborted:
            return None
        except BackendError as error:
            log.warning("%s drafts nothing in this round: %s", self.drafter.name, error)
            return None


def or_else(said: Number | None, default: Number) -> Number:
    return default if said is None else said
