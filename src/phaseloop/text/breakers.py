"""Sequence breakers of the DRY sampler: from strings to the tokens that a repetition ends at.

They are plain pairs (head, tail), as this layer knows nothing of samplers: where the token `head`
is followed by the tokens of `tail`, the string is complete.
"""

from functools import lru_cache
from typing import TypeAlias

from .tokenizer import Tokenizer

Breaker: TypeAlias = tuple[int, tuple[int, ...]]

# llama.cpp's bounds (build 11434): DRY looks for breakers at each token of its window.
STRING_BYTES_MAX = 40
TAIL_LENGTH_MAX = 20


@lru_cache(maxsize=16)
def breakers(tokenizer: Tokenizer, strings: tuple[str, ...]) -> tuple[Breaker, ...]:
    """The breakers of some strings, by head; empty strings are passed over.

    A token whose piece contains the string is one by itself.  A token whose piece ends with a
    beginning of the string is one if the tokens of the rest follow.  Takes tens of milliseconds
    for strings not seen before.
    """
    found: set[Breaker] = set()
    for string in strings:
        raw = string.encode(errors="ignore")[:STRING_BYTES_MAX]
        if raw:
            found.update(breakers_of(tokenizer, raw))
    return tuple(sorted(found))


def breakers_of(tokenizer: Tokenizer, raw: bytes) -> set[Breaker]:
    tails = {raw[:end]: tail_of(tokenizer, raw[end:]) for end in range(1, len(raw))}
    beginnings = tuple(tails)
    found: set[Breaker] = set()
    for token, piece in enumerate(pieces(tokenizer)):
        if raw in piece:
            found.add((token, ()))
        elif piece.endswith(beginnings):
            found.update((token, tail) for start, tail in tails.items() if piece.endswith(start))
    return found


def tail_of(tokenizer: Tokenizer, rest: bytes) -> tuple[int, ...]:
    """A rest that begins amid a character has no text, and so a tail that never follows."""
    return tokenizer.encode(rest.decode(errors="replace"))[:TAIL_LENGTH_MAX]


@lru_cache(maxsize=4)
def pieces(tokenizer: Tokenizer) -> tuple[bytes, ...]:
    return tuple(map(tokenizer.piece, range(len(tokenizer.vocabulary.tokens))))
