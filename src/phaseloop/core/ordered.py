"""A persistent ordered list of integer pairs: the queue's order and the timers.

Two levels of tuples, so that insert and remove copy about sqrt(n) pointers (about 1 us at 10,000
entries) and the first entry is at hand.  A heap would make cancelling cost O(n).
"""

from typing import TypeAlias

Key: TypeAlias = tuple[int, int]
Ordered: TypeAlias = tuple[tuple[Key, ...], ...]  # blocks, none empty, all keys ascending

BLOCK_LENGTH_MAX = 128


def first(entries: Ordered) -> Key | None:
    return entries[0][0] if entries else None


def keys(entries: Ordered) -> tuple[Key, ...]:
    return tuple(key for block in entries for key in block)


def insert(entries: Ordered, key: Key) -> Ordered:
    if not entries:
        return ((key,),)
    b = block_of(entries, key)
    block = entries[b]
    i = position(block, key)
    block = (*block[:i], key, *block[i:])
    if len(block) <= BLOCK_LENGTH_MAX:
        return (*entries[:b], block, *entries[b + 1 :])
    # Keys mostly grow: leaving the left block nearly full keeps the number of blocks small.
    cut = BLOCK_LENGTH_MAX * 3 // 4
    return (*entries[:b], block[:cut], block[cut:], *entries[b + 1 :])


def remove(entries: Ordered, key: Key) -> Ordered:
    """Without `key`, which must be there."""
    b = block_of(entries, key)
    block = entries[b]
    i = position(block, key)
    assert i < len(block) and block[i] == key, f"{key} is not in the ordered list"
    block = (*block[:i], *block[i + 1 :])
    return (*entries[:b], block, *entries[b + 1 :]) if block else (*entries[:b], *entries[b + 1 :])


def block_of(entries: Ordered, key: Key) -> int:
    """The last block that starts at or before `key`, or the first."""
    low, high = 0, len(entries) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if entries[middle][0] <= key:
            low = middle
        else:
            high = middle - 1
    return low


def position(block: tuple[Key, ...], key: Key) -> int:
    low, high = 0, len(block)
    while low < high:
        middle = (low + high) // 2
        if block[middle] < key:
            low = middle + 1
        else:
            high = middle
    return low
