"""SentencePiece's way: characters merge into tokens, the token with the best score first.

No token of the common vocabularies has a blank behind another character, so a text falls apart into
words before its blanks, and each can be done, and remembered, on its own.  Where tokens do reach
over a blank, the words on both sides of it stay together; so the answer is that of the whole text.
"""

import re
from collections.abc import Iterator
from itertools import pairwise

from .merging import merge
from .metadata import byte_of
from .vocabulary import FROM_TEXT, TokenType, Vocabulary
from .words import WordCache

BLANK = "▁"
WORD = re.compile(f"{BLANK}*[^{BLANK}]+|{BLANK}+")


class SentencePieceEncoder:
    """Turns ordinary text into tokens.  May be used by several threads at once."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        ids = {
            text: token
            for token, text in enumerate(vocabulary.tokens)
            if vocabulary.types[token] in FROM_TEXT
        }
        scores = sorted({vocabulary.scores[token] for token in ids.values()}, reverse=True)
        rank_of = {score: rank for rank, score in enumerate(scores)}
        self._ids = ids
        self._found = {
            text: (rank_of[vocabulary.scores[token]], text) for text, token in ids.items()
        }
        self._bytes = {
            byte: token
            for token, (text, kind) in enumerate(
                zip(vocabulary.tokens, vocabulary.types, strict=True)
            )
            if kind == TokenType.BYTE and (byte := byte_of(text)) is not None
        }
        self._unknown = vocabulary.special.unk
        self._glued = {left for text in ids for left, right in pairwise(text) if right == BLANK} - {
            BLANK
        }
        self._words = WordCache(self._encode_word)

    def encode(self, text: str) -> list[int]:
        """Characters without a token become bytes; without tokens for these, the unknown token."""
        return self._words.encode(self._split(text.replace(" ", BLANK)))

    def _split(self, text: str) -> Iterator[str]:
        """Parts that no token reaches across."""
        words = WORD.findall(text)
        if not self._glued:
            yield from words
            return
        start = 0
        for index, word in enumerate(words):
            if word[-1] not in self._glued:
                yield "".join(words[start : index + 1])
                start = index + 1
        if start < len(words):
            yield "".join(words[start:])

    def _encode_word(self, word: str) -> tuple[int, ...]:
        found = self._found
        symbols = merge(list(word), lambda left, right: found.get(left + right))
        return tuple(token for symbol in symbols for token in self._tokens_of(symbol))

    def _tokens_of(self, symbol: str) -> tuple[int, ...]:
        token = self._ids.get(symbol)
        if token is not None:
            return (token,)
        raw = symbol.encode()
        if all(byte in self._bytes for byte in raw):
            return tuple(self._bytes[byte] for byte in raw)
        return () if self._unknown is None else (self._unknown,)
