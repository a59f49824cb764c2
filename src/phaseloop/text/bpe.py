"""Byte-level BPE: a word's bytes are written as characters, and pairs of these merge by rank."""

from .merging import merge
from .pretokenizers import PRE_TOKENIZERS, splitter
from .vocabulary import FROM_TEXT, Vocabulary
from .words import WordCache


def byte_characters() -> dict[int, str]:
    """The character that stands for each byte: itself where it prints, else one past U+00FF."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printing]
    return {
        **{byte: chr(byte) for byte in printing},
        **{byte: chr(0x100 + index) for index, byte in enumerate(others)},
    }


CHARACTER_OF = byte_characters()
BYTE_OF = {character: byte for byte, character in CHARACTER_OF.items()}


class BytePairEncoder:
    """Turns ordinary text into tokens.  May be used by several threads at once.

    A symbol is a number: a token's id, or one past them for a merge's part that is no token.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._split = splitter(vocabulary.pre)
        self._ids = {
            text: token
            for token, text in enumerate(vocabulary.tokens)
            if vocabulary.types[token] in FROM_TEXT
        }
        self._whole_words = PRE_TOKENIZERS[vocabulary.pre].whole_words
        self._token_count = len(vocabulary.tokens)
        self._partial: list[str] = []  # texts of the symbols that are no tokens
        symbols = dict(self._ids)
        self._byte_symbols = [self._symbol(symbols, CHARACTER_OF[byte]) for byte in range(0x100)]
        self._merges: dict[tuple[int, int], tuple[int, int]] = {}
        for rank, text in enumerate(vocabulary.merges):
            left, _, right = text.partition(" ")
            pair = (self._symbol(symbols, left), self._symbol(symbols, right))
            self._merges.setdefault(pair, (rank, self._symbol(symbols, left + right)))
        self._words = WordCache(self._encode_word)

    def encode(self, text: str) -> list[int]:
        """Bytes that the vocabulary has no token for are left out."""
        return self._words.encode(self._split(text))

    def _symbol(self, symbols: dict[str, int], text: str) -> int:
        symbol = symbols.get(text)
        if symbol is None:
            symbol = symbols[text] = self._token_count + len(self._partial)
            self._partial.append(text)
        return symbol

    def _encode_word(self, word: str) -> tuple[int, ...]:
        raw = word.encode()
        if self._whole_words:
            token = self._ids.get("".join(map(CHARACTER_OF.__getitem__, raw)))
            if token is not None:
                return (token,)
        merges = self._merges
        symbols = merge(
            [self._byte_symbols[byte] for byte in raw],
            lambda left, right: merges.get((left, right)),
        )
        return tuple(token for symbol in symbols for token in self._tokens_of(symbol))

    def _tokens_of(self, symbol: int) -> tuple[int, ...]:
        if symbol < self._token_count:
            return (symbol,)
        characters = self._partial[symbol - self._token_count]
        return tuple(self._ids[character] for character in characters if character in self._ids)
