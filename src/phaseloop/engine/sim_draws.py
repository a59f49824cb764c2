"""Random numbers as a pure function of what they are for.

A draw depends on its key alone, not on how many were made before: so a request keeps its length,
and a round its jitter, whatever else happens, and nothing has to be restored to repeat a run.
"""

from hashlib import blake2b

BITS = 64


def draw(*key: int) -> int:
    """A uniform integer of 64 bits."""
    return int.from_bytes(blake2b(repr(key).encode(), digest_size=8).digest(), "big")


def uniform(*key: int) -> float:
    """A uniform number in [0, 1), with the 53 bits that a float can hold."""
    return (draw(*key) >> (BITS - 53)) / (1 << 53)


def successes(per_million: int, most: int, *key: int) -> int:
    """How many of up to `most` independent trials succeed before the first that fails."""
    if most <= 0 or per_million <= 0:
        return 0
    bits = blake2b(repr(key).encode(), digest_size=min(2 * most, 64)).digest()
    threshold = per_million * (1 << 16) // 1_000_000
    for count in range(min(most, 32)):
        if int.from_bytes(bits[2 * count : 2 * count + 2], "big") >= threshold:
            return count
    return min(most, 32)
