"""What the sim engine gives instead of embeddings: each token has a vector of its own.

So prompts with the same words are near each other, and equal prompts have equal vectors.
"""

from array import array
from collections.abc import Sequence
from functools import cache
from hashlib import blake2b
from sys import byteorder

from .settings import Pooling, Vectors
from .sim_draws import uniform

WIDTH = 32
RANK_KEY = 6
SCALE = 1 << 15


def vectors_of(tokens: Sequence[int], pooling: Pooling) -> Vectors:
    match pooling:
        case "none":
            return packed([number for token in tokens for number in vector(token)], WIDTH)
        case "mean":
            sums = map(sum, zip(*map(vector, tokens), strict=True))
            return packed([number / len(tokens) for number in sums], WIDTH)
        case "cls":
            return packed(vector(tokens[0]), WIDTH)
        case "last":
            return packed(vector(tokens[-1]), WIDTH)
        case "rank":
            return packed([uniform(RANK_KEY, *tokens)], 1)


@cache
def vector(token: int) -> tuple[float, ...]:
    """In [-1, 1); exact in float32, as are sums of many."""
    bits = blake2b(repr(token).encode(), digest_size=2 * WIDTH).digest()
    pairs = (bits[place : place + 2] for place in range(0, len(bits), 2))
    return tuple(int.from_bytes(pair, "little", signed=True) / SCALE for pair in pairs)


def packed(numbers: Sequence[float], width: int) -> Vectors:
    values = array("f", numbers)
    if byteorder == "big":
        values.byteswap()
    return Vectors(width, values.tobytes())
