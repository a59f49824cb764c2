"""Several drafters as one: each follows, and of their drafts the first are taken that there are."""

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from phaseloop.core.vocabulary import SlotIndex
from phaseloop.ops.interface import Aborted, BackendError

from .draft import Computed, Drafter, Followed, Wish


class FollowedAll(Struct, frozen=True):
    """Implements draft.Followed: one per drafter."""

    states: tuple[Followed | None, ...]

    @property
    def size_bytes(self) -> int:
        return sum(state.size_bytes for state in self.states if state is not None)


class Drafters:
    """Implements draft.Drafter.  `drafters` are asked in their order."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = tuple(drafters)
        self.name = ",".join(drafter.name for drafter in drafters)
        self.wants_hidden = any(drafter.wants_hidden for drafter in drafters)
        self.most = max(drafter.most for drafter in drafters)
        self.position_bytes = sum(drafter.position_bytes for drafter in drafters)

    def follow(self, computed: Sequence[Computed]) -> None:
        """One that fails keeps no other from following."""
        problem: Aborted | BackendError | None = None
        for drafter in self._drafters:
            try:
                drafter.follow(computed)
            except (Aborted, BackendError) as error:
                problem = error
        if problem is not None:
            raise problem

    def propose(self, wishes: Sequence[Wish]) -> list[tuple[int, ...]]:
        found: list[tuple[int, ...]] = [()] * len(wishes)
        for drafter in self._drafters:
            open_places = [place for place, drafts in enumerate(found) if not drafts]
            if not open_places:
                break
            left = [capped(wishes[place], drafter.most) for place in open_places]
            for place, drafts in zip(open_places, drafter.propose(left), strict=True):
                found[place] = drafts
        return found

    def truncate(self, slot: SlotIndex, length: int) -> None:
        for drafter in self._drafters:
            drafter.truncate(slot, length)

    def fork(self, source: SlotIndex, target: SlotIndex, length: int) -> None:
        for drafter in self._drafters:
            drafter.fork(source, target, length)

    def save(self, slot: SlotIndex, length: int) -> FollowedAll:
        return FollowedAll(tuple(drafter.save(slot, length) for drafter in self._drafters))

    def restore(self, slot: SlotIndex, state: Followed | None, length: int) -> None:
        states = state.states if isinstance(state, FollowedAll) else (None,) * len(self._drafters)
        for drafter, one in zip(self._drafters, states, strict=True):
            drafter.restore(slot, one, length)

    def shift(self, slot: SlotIndex, start: int, count: int) -> None:
        for drafter in self._drafters:
            drafter.shift(slot, start, count)

    def abort(self) -> None:
        for drafter in self._drafters:
            drafter.abort()

    def resume(self) -> None:
        for drafter in self._drafters:
            drafter.resume()

    def close(self) -> None:
        for drafter in self._drafters:
            drafter.close()


def capped(wish: Wish, most: int) -> Wish:
    return wish if wish.count <= most else replace(wish, count=most)
