"""Which pages hold the keys and values of which positions of which region.

A page has 256 positions, in every layer on every device under the same number.  Page i of a region
has its positions from 256 i on.  A page that several regions share is never written: who goes on
within it gets a copy of its own first.
"""

from msgspec import Struct

from phaseloop.kernels.kv import PAGE

from .interface import BackendError, Region


class PageCopy(Struct, frozen=True):
    source: int
    target: int


class Pages:
    def __init__(self, page_count: int, region_count: int) -> None:
        self._free = list(range(page_count - 1, -1, -1))  # the lowest are taken first
        self._holders = [0] * page_count
        self._tables: list[list[int]] = [[] for _ in range(region_count)]

    @property
    def free_count(self) -> int:
        return len(self._free)

    def table(self, region: Region) -> list[int]:
        """The pages of a region, in order."""
        return self._tables[region]

    def extend(self, region: Region, start: int, end: int) -> list[PageCopy]:
        """Make [start, end) writable, and say what must be copied before.

        Raises BackendError, and leaves everything as it is, where there are too few pages.
        """
        table = self._tables[region]
        if len(table) < pages_for(start):
            raise BackendError(
                f"KV region {region}: holds {len(table)} pages, the round begins at {start}"
            )
        first, wanted = start // PAGE, pages_for(end)
        is_shared = start % PAGE > 0 and self._holders[table[first]] > 1
        missing = wanted - len(table) + is_shared
        if missing > len(self._free):
            raise BackendError(
                f"KV region {region}: {missing} pages wanted, {len(self._free)} are free of "
                f"{len(self._holders)}"
            )
        copies: list[PageCopy] = []
        if is_shared:
            copies.append(PageCopy(table[first], self._take()))
            self._give(table[first])
            table[first] = copies[0].target
        while len(table) < wanted:
            table.append(self._take())
        return copies

    def truncate(self, region: Region, length: int) -> None:
        table = self._tables[region]
        while len(table) > pages_for(length):
            self._give(table.pop())

    def share(self, source: Region, target: Region, length: int) -> list[PageCopy]:
        """Give the empty `target` the first `length` positions; the unfinished page is copied."""
        assert not self._tables[target], "the target of a copy is empty"
        whole = length // PAGE
        unfinished = self._tables[source][whole : pages_for(length)]
        if len(unfinished) > len(self._free):
            raise BackendError(f"KV region {target}: no page is free for a copy")
        for page in self._tables[source][:whole]:
            self._holders[page] += 1
            self._tables[target].append(page)
        copies = [PageCopy(page, self._take()) for page in unfinished]
        self._tables[target] += [copy.target for copy in copies]
        return copies

    def check_replaceable(self, region: Region, first: int) -> None:
        """Raises BackendError unless pages from number `first` on can be replaced one by one."""
        shared = sum(self._holders[page] > 1 for page in self._tables[region][first:])
        if len(self._free) < shared + 1:
            raise BackendError(
                f"KV region {region}: {shared + 1} pages wanted to shift into, "
                f"{len(self._free)} are free of {len(self._holders)}"
            )

    def replace(self, region: Region, index: int) -> PageCopy:
        """A fresh page instead of a region's, whose content is to be made from the old one."""
        table = self._tables[region]
        old, table[index] = table[index], self._take()
        self._give(old)
        return PageCopy(old, table[index])

    def _take(self) -> int:
        page = self._free.pop()
        self._holders[page] = 1
        return page

    def _give(self, page: int) -> None:
        self._holders[page] -= 1
        if not self._holders[page]:
            self._free.append(page)


def pages_for(length: int) -> int:
    return -(-length // PAGE)
