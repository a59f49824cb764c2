"""Beginnings of earlier sequences in host RAM: what their slots were taken from them with.

A snapshot is made when a slot loses state that nobody else holds, and never before: an append-only
chat, which finds its state in place, costs no copy.  It is immutable, stays when it is used, and
goes when the bytes are wanted for others, the longest unused first.

One thread, the engine's, changes the store; any thread may look.  A look sees one tuple, which is
replaced and never altered, so there is no lock and nobody waits for a copy.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from phaseloop.ops.interface import Snapshot

from .draft import Followed
from .reuse import reachable
from .settings import Adapters

Ids: TypeAlias = NDArray[np.int32]

# Tokens.  On a CPU a token is copied in microseconds and computed in milliseconds, but a round that
# copies costs about a millisecond by itself.
MOVE_MIN = 8
# Few snapshots are ever used, and each copies a whole sequence for the sake of what would be lost:
# so that must be this many tokens, and one token of it may cost this many copies.
KEEP_MIN = 32
COPIES_MAX = 16
MIB = 1 << 20
BUDGET_MIB = 8192
FIRST_STEP = 64  # tokens; most prompts part within them


class Kept(Struct, frozen=True):
    """A snapshot and the tokens it is the state of."""

    snapshot_id: int
    ids: Ids
    cells: Snapshot
    followed: Followed | None = None  # the drafter's state of the same tokens
    adapters: Adapters = ()  # it was computed with, and serves no prompt with others


class Found(Struct, frozen=True):
    """A snapshot that begins as a prompt does, for `length` tokens."""

    kept: Kept
    length: int


class Snapshots:
    """`budget_bytes` bounds the snapshots together; 0 keeps none."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._next_id = 0
        self._kept: tuple[Kept, ...] = ()  # the longest unused first

    @property
    def size_bytes(self) -> int:
        return sum(size_bytes(kept) for kept in self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    # --- from any thread --------------------------------------------------------------------------

    def find(self, prompt: Ids, adapters: Adapters = ()) -> Found | None:
        """The snapshot that spares a prompt the most; of equals, the one used last."""
        best, length = None, 0
        for kept in self._kept:
            if kept.adapters != adapters:
                continue
            common = common_length(kept.ids, prompt)
            spared = reachable(common, kept.cells.positions)
            if spared and spared >= length:
                best, length = kept, spared
        return None if best is None else Found(best, length)

    # --- from the engine's thread -----------------------------------------------------------------

    def put(
        self,
        ids: Ids,
        state_bytes: int,
        save: Callable[[], Snapshot],
        follow: Callable[[], Followed | None] = lambda: None,
        adapters: Adapters = (),
    ) -> bool:
        """Keep a state, unless a snapshot covers it or it is over the budget; says whether it did.

        `save` copies the state and `follow` the drafter's, after room has been made for their
        `state_bytes`.  Snapshots of a beginning of `ids` are dropped: the longer one serves whom
        they would.
        """
        wanted_bytes = state_bytes + ids.nbytes
        if wanted_bytes > self.budget_bytes or self._covers(ids, adapters):
            return False
        others = [
            kept
            for kept in self._kept
            if kept.adapters != adapters or common_length(kept.ids, ids) < len(kept.ids)
        ]
        used_bytes = sum(size_bytes(kept) for kept in others)
        while used_bytes + wanted_bytes > self.budget_bytes:
            used_bytes -= size_bytes(others.pop(0))
        self._kept = tuple(others)  # their memory is free before the copy takes its own
        self._kept += (Kept(self._next_id, ids, save(), follow(), adapters),)
        self._next_id += 1
        return True

    def touch(self, used: Kept) -> None:
        """It is the one used last, if it is still there."""
        others = tuple(kept for kept in self._kept if kept is not used)
        if len(others) < len(self._kept):
            self._kept = (*others, used)

    def _covers(self, ids: Ids, adapters: Adapters) -> bool:
        found = self.find(ids, adapters)
        if found is None or found.length < len(ids):
            return False
        self.touch(found.kept)
        return True


def size_bytes(kept: Kept) -> int:
    followed_bytes = 0 if kept.followed is None else kept.followed.size_bytes
    return kept.cells.size_bytes + kept.ids.nbytes + followed_bytes


def is_worth_keeping(lost: int, length: int) -> bool:
    """Whether `lost` tokens of a state of `length` justify a copy of it, or another slot."""
    return lost >= KEEP_MIN and lost * COPIES_MAX >= length


def packed(tokens: Sequence[int]) -> Ids:
    """Token ids to be compared fast: a million in 13 ms, once."""
    return np.array(tokens, np.int32)


def common_length(left: Ids, right: Ids) -> int:
    """How many leading tokens two sequences share."""
    start, stop, end = 0, FIRST_STEP, min(len(left), len(right))
    while start < end:
        differs = left[start : min(stop, end)] != right[start : min(stop, end)]
        first = int(differs.argmax())
        if differs[first]:
            return start + first
        start, stop = stop, 16 * stop
    return end


# --- the budget -----------------------------------------------------------------------------------


def budget_bytes(cache_ram_mib: int | None) -> int:
    """What `--cache-ram` means: MiB, 0 for none, -1 for no bound.

    None is the default: 8192, but no more than half of the memory that the process can have.
    """
    if cache_ram_mib is None:
        return min(BUDGET_MIB * MIB, memory_bytes() // 2)
    return sys.maxsize if cache_ram_mib < 0 else cache_ram_mib * MIB


MEMORY_AVAILABLE = Path("/proc/meminfo")
MEMORY_LIMITS = (  # of the process's control group, version 2 and 1
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def memory_bytes(
    available: Path = MEMORY_AVAILABLE, limits: tuple[Path, ...] = MEMORY_LIMITS
) -> int:
    """What the machine has available, and the control group allows.

    What the group uses now is not subtracted: most of it may be file pages that it can drop.  On a
    system that has none of the files nothing is known to be available.
    """
    bounds = [int(text) for path in limits if (text := read(path).strip()).isdigit()]
    lines = dict(line.split(":", 1) for line in read(available).splitlines() if ":" in line)
    if "MemAvailable" in lines:
        bounds.append(int(lines["MemAvailable"].split()[0]) * 1024)
    return min(bounds, default=0)


def read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
