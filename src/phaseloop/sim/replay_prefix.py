"""Which prompts of a trace begin alike, as far as it shows, and what slots hold in a changed run.

A trace has no tokens, but three kinds of evidence: an arrival names earlier requests that begin
like it; it names slots whose content it begins with; and a seat is found to hold so many of its
tokens.  Requests that are linked by any of these are one family.  How much two of a family have in
common is not recorded for every pair: it is taken to be as much as either is known to share.
"""

from collections.abc import Iterable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from phaseloop.core.state import State
from phaseloop.core.vocabulary import Candidate, Request, RequestId, Shared, SlotIndex

SHARED_MAX = 8  # earlier requests that an arrival names

Held = tuple[RequestId, int]  # whose state an empty slot holds, and how many tokens of it


class Prefix(Struct, frozen=True):
    """The beginning of a prompt that all of one family share."""

    request_id: RequestId
    family: int
    length: int


class Kin:
    """Collects evidence."""

    def __init__(self) -> None:
        self._parents: dict[RequestId, RequestId] = {}
        self._lengths: dict[RequestId, int] = {}

    def link(self, one: RequestId, other: RequestId, length: int) -> None:
        """Both prompts begin with the same `length` tokens."""
        if length <= 0 or one == other:
            return
        first, second = sorted((self._root(one), self._root(other)))
        self._parents[second] = first
        for request_id in (one, other):
            self._lengths[request_id] = max(self._lengths.get(request_id, 0), length)

    def prefixes(self) -> tuple[Prefix, ...]:
        return tuple(
            Prefix(request_id, self._root(request_id), length)
            for request_id, length in sorted(self._lengths.items())
        )

    def _root(self, request_id: RequestId) -> RequestId:
        root = request_id
        while (parent := self._parents.get(root, root)) != root:
            root = parent
        while request_id != root:  # the next look is short
            request_id, self._parents[request_id] = self._parents[request_id], root
        return root


class Shelf:
    """What the slots hold, and who is alive, in a run that is made again."""

    def __init__(
        self,
        prefixes: Iterable[Prefix],
        held: Mapping[SlotIndex, Held],
        seated: Mapping[SlotIndex, RequestId],
        alive: Iterable[RequestId],
    ) -> None:
        self._prefixes = {prefix.request_id: prefix for prefix in prefixes}
        self._held = dict(held)
        self._seated = dict(seated)
        self._alive: dict[RequestId, None] = dict.fromkeys(alive)

    def seat(self, slot: SlotIndex, request_id: RequestId) -> int:
        """Put a request into a slot; how many of its tokens were there."""
        found = self.found(slot, request_id)
        self._held.pop(slot, None)
        self._seated[slot] = request_id
        return found

    def found(self, slot: SlotIndex, request_id: RequestId) -> int:
        held = self._held.get(slot)
        return 0 if held is None else min(self.common(held[0], request_id), held[1])

    def release(self, slot: SlotIndex, keep: int) -> None:
        request_id = self._seated.pop(slot, None)
        held = self._held.pop(slot, None) if request_id is None else (request_id, keep)
        if held is not None and keep:
            self._held[slot] = held[0], keep

    def common(self, one: RequestId, other: RequestId) -> int:
        first, second = self._prefixes.get(one), self._prefixes.get(other)
        if first is None or second is None or first.family != second.family:
            return 0
        return min(first.length, second.length)

    def arrive(self, request: Request) -> None:
        self._alive[request.request_id] = None

    def end(self, request_id: RequestId) -> None:
        self._alive.pop(request_id, None)

    def renamed(self, request: Request, state: State) -> Request:
        """The request with candidates and shared prefixes as they are now, not as recorded."""
        request_id = request.request_id
        if request_id not in self._prefixes:
            return request
        slots = tuple(
            Candidate("slot", slot, state.caches[slot].version, length)
            for slot in sorted(self._held)
            if state.slots[slot] is None and (length := self.found(slot, request_id))
        )
        snapshots = tuple(c for c in request.candidates if c.source == "snapshot")
        shared = tuple(
            Shared(other, length)
            for other in self._alive
            if (length := self.common(other, request_id)) >= state.limits.share_length_min
        )
        return replace(request, candidates=slots + snapshots, shared=shared[-SHARED_MAX:])
