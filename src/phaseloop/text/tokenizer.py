"""Text to tokens and back, as the model's file describes it."""

from collections.abc import Callable, Iterable
from typing import Protocol

from .bpe import BYTE_OF, BytePairEncoder
from .metadata import byte_of
from .special import SpecialTokens
from .spm import BLANK, SentencePieceEncoder
from .vocabulary import HIDDEN, MATCHED_ALWAYS, MATCHED_IF_PARSED, Model, TokenType, Vocabulary
from .wordpiece import WordPieceEncoder


class Encoder(Protocol):
    """Turns text without special tokens into tokens."""

    def encode(self, text: str) -> list[int]: ...


ENCODERS: dict[Model, Callable[[Vocabulary], Encoder]] = {
    "llama": SentencePieceEncoder,
    "gpt2": BytePairEncoder,
    "bert": WordPieceEncoder,
}


class Tokenizer:
    """A model's tokenizer.  Immutable but for caches, so threads may share it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.end_ids = frozenset(vocabulary.end_ids)
        self._encoder = ENCODERS[vocabulary.model](vocabulary)
        self._parsed = self._special(MATCHED_IF_PARSED)
        self._unparsed = self._special(MATCHED_ALWAYS)

    def encode(
        self, text: str, *, add_special: bool = False, parse_special: bool = False
    ) -> tuple[int, ...]:
        """The text's tokens.

        `add_special` puts what the model wants first and last around them.  `parse_special` lets a
        text like <|im_start|> become the control token of that name; without it, it is ordinary
        text, as it must be where users write it.  Lone surrogates count as U+FFFD.
        """
        vocabulary = self.vocabulary
        special = vocabulary.special
        tokens: list[int] = []
        if add_special and vocabulary.add_bos and special.bos is not None:
            tokens.append(special.bos)
        prefix = " " if vocabulary.add_space_prefix else ""  # to each part of ordinary text
        for part in (self._parsed if parse_special else self._unparsed).partition(_valid(text)):
            if isinstance(part, int):
                tokens.append(part)
            else:
                tokens += self._encoder.encode(prefix + part)
        if add_special and vocabulary.add_eos and special.eos is not None:
            tokens.append(special.eos)
        if add_special and vocabulary.add_sep and special.sep is not None:
            tokens.append(special.sep)
        return tuple(tokens)

    def piece(self, token: int, *, special: bool = True) -> bytes:
        """The bytes that a token stands for; none for a control token unless `special`.

        Raises IndexError for a number that is no token.
        """
        if token < 0:
            raise IndexError(token)
        kind = self.vocabulary.types[token]
        text = self.vocabulary.tokens[token]
        if kind == TokenType.NORMAL:
            return self._decoded(text)
        if kind == TokenType.BYTE:
            byte = byte_of(text)
            assert byte is not None
            return bytes([byte])
        if kind == TokenType.UNUSED or (kind in HIDDEN and not special):
            return b""
        return text.encode()

    def decode(self, tokens: Iterable[int], *, special: bool = True) -> str:
        """The text of tokens; bytes that are no UTF-8 become U+FFFD.  Raises IndexError."""
        raw = b"".join(self.piece(token, special=special) for token in tokens)
        return raw.decode(errors="replace")

    def _decoded(self, text: str) -> bytes:
        if self.vocabulary.model != "gpt2":
            return text.replace(BLANK, " ").encode()
        try:
            return bytes(map(BYTE_OF.__getitem__, text))
        except KeyError:  # not written in the byte alphabet: added by hand, so meant as it stands
            return text.encode()

    def _special(self, kinds: tuple[TokenType, ...]) -> SpecialTokens:
        vocabulary = self.vocabulary
        rows = enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        tokens = [(text, token) for token, (text, kind) in rows if kind in kinds]
        return SpecialTokens(tokens, vocabulary.strip_after)


def _valid(text: str) -> str:
    """The text as it can be written in UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
