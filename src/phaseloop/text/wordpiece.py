"""BERT's way: words without their capitals and accents, each cut into the longest known pieces.

In a GGUF file a piece that begins a word is written with a blank of SentencePiece before it, and
one that goes on with a word as it is.  Which characters are letters, marks and so on, and in which
order they are treated, is as in the library that the models were trained with.
"""

import unicodedata
from collections.abc import Iterator

from .spm import BLANK
from .vocabulary import FROM_TEXT, Vocabulary
from .words import WordCache

WORD_LENGTH_MAX = 100  # characters; what is longer is unknown as a whole
IDEOGRAPHS = (  # each of them is a word; the bounds are those of the training
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B920, 0x2CEAF),
    (0x2F800, 0x2FA1F),
)
KEPT_CONTROLS = "\t\n\r"


class WordPieceEncoder:
    """Turns ordinary text into tokens.  May be used by several threads at once."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._first: dict[str, int] = {}  # pieces that begin a word
        self._later: dict[str, int] = {}
        for token, text in enumerate(vocabulary.tokens):
            if vocabulary.types[token] in FROM_TEXT:
                begins = text.startswith(BLANK) and text != BLANK
                (self._first if begins else self._later)[text.removeprefix(BLANK)] = token
        self._length_max = max(map(len, (*self._first, *self._later)), default=0)
        self._unknown = vocabulary.special.unk
        self._lowercase = vocabulary.lowercase
        self._strip_accents = vocabulary.strip_accents
        self._words = WordCache(self._encode_word)

    def encode(self, text: str) -> list[int]:
        """Words that cannot be put together from pieces become the unknown token."""
        return self._words.encode(self._split(self._normalised(text)))

    def _normalised(self, text: str) -> str:
        text = "".join(map(cleaned, text))
        if self._strip_accents:
            decomposed = unicodedata.normalize("NFD", text)
            text = "".join(c for c in decomposed if unicodedata.category(c) != "Mn")
        if self._lowercase:
            text = "".join(map(str.lower, text))  # one by one: no letter looks at its neighbours
        return text

    def _split(self, text: str) -> Iterator[str]:
        """Words and, each by itself, punctuation marks."""
        for part in text.split():
            start = 0
            for place, character in enumerate(part):
                if is_punctuation(character):
                    if place > start:
                        yield part[start:place]
                    yield character
                    start = place + 1
            if start < len(part):
                yield part[start:]

    def _encode_word(self, word: str) -> tuple[int, ...]:
        unknown = () if self._unknown is None else (self._unknown,)
        if len(word) > WORD_LENGTH_MAX:
            return unknown
        tokens: list[int] = []
        pieces, start = self._first, 0
        while start < len(word):
            stop = min(len(word), start + self._length_max)
            while stop > start and word[start:stop] not in pieces:
                stop -= 1
            if stop == start:
                return unknown
            tokens.append(pieces[word[start:stop]])
            pieces, start = self._later, stop
        return tuple(tokens)


def cleaned(character: str) -> str:
    """Nothing for control characters, a blank for any space, blanks around an ideograph."""
    if character == " " or character in KEPT_CONTROLS:
        return " "
    if character in ("\0", "\ufffd") or unicodedata.category(character)[0] == "C":
        return ""
    if character.isspace():
        return " "
    if is_ideograph(character):
        return f" {character} "
    return character


def is_ideograph(character: str) -> bool:
    code = ord(character)
    return any(first <= code <= last for first, last in IDEOGRAPHS)


def is_punctuation(character: str) -> bool:
    """Also what is a symbol to Unicode, where it is ASCII."""
    if character.isascii():
        return character.isprintable() and not character.isalnum() and character != " "
    return unicodedata.category(character)[0] == "P"
