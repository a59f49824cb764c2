"""Numbers for lists of adapters, so that the reducer can tell which requests share rounds (R7).

Equal lists have one number as long as it is remembered.  One that was forgotten gets another when
it comes back: it then shares no round with those of before, which costs time and no correctness.
"""

from collections import OrderedDict

from phaseloop.engine.settings import Adapters

KEPT_MAX = 1024  # clients choose scales, and no two need be alike


class AdapterLists:
    """Belongs to the event loop's thread.  No number ever means two lists; none is 0."""

    def __init__(self, kept_max: int = KEPT_MAX) -> None:
        self._kept_max = kept_max
        self._numbers: OrderedDict[Adapters, int] = OrderedDict()  # the one unused longest first
        self._next = 1

    def number(self, adapters: Adapters) -> int:
        known = self._numbers.get(adapters)
        if known is not None:
            self._numbers.move_to_end(adapters)
            return known
        if len(self._numbers) == self._kept_max:
            self._numbers.popitem(last=False)
        self._numbers[adapters] = found = self._next
        self._next += 1
        return found
