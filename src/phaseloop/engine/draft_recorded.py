"""Drafts out of a record: a round that is run again yields as many tokens as it did.

What a lane may yield depends on the drafts that it verifies.  With those that were accepted then,
and no others, it must yield the same tokens, or the engine does not compute what it did.
"""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from phaseloop.core.vocabulary import RequestId

from .draft import NoDrafts, Wish

Choice: TypeAlias = tuple[RequestId, int]


class RecordedDrafts(NoDrafts):
    """Implements draft.Drafter.  Tell it each round before it is run."""

    name = "recorded"

    def __init__(self, most: int) -> None:
        self.most = most
        self._accepted: Mapping[Choice, tuple[int, ...]] = {}

    def tell(self, accepted: Mapping[Choice, tuple[int, ...]]) -> None:
        """What the next round's lanes accepted in the record."""
        self._accepted = accepted

    def propose(self, wishes: Sequence[Wish]) -> list[tuple[int, ...]]:
        return [self._accepted.get((wish.draw.request_id, wish.draw.choice), ()) for wish in wishes]
