"""Tokens to text as they arrive, never a part of a character.

A model's token may end within a character, or hold bytes that no text has.  What may still become a
character is held back, which is at most three bytes; what cannot is replaced by U+FFFD, once for
each longest part that could have begun a character, as browsers do.
"""

import codecs
from collections.abc import Iterable

from .tokenizer import Tokenizer

SURROGATE_FROM, SURROGATE_TO = b"\xed\xa0", b"\xee"


class Detokenizer:
    """The text of one answer: all that it returns, joined, is the decoding of all its tokens."""

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False) -> None:
        """`special` shows control tokens as text."""
        self._tokenizer = tokenizer
        self._special = special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, tokens: Iterable[int]) -> str:
        """The characters that these tokens complete.  Raises IndexError for what is no token."""
        pieces = [self._tokenizer.piece(token, special=self._special) for token in tokens]
        text = self._decoder.decode(b"".join(pieces))
        held = self._decoder.getstate()[0]
        # Python's decoder waits for the third byte of a surrogate, which no text has.
        return text + self.finish() if SURROGATE_FROM <= held < SURROGATE_TO else text

    def finish(self) -> str:
        """What is left when nothing follows; then the object is as new."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
