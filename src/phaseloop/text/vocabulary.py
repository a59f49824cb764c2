"""What a tokenizer is made of: tokens, their kinds, how they merge, what the special ones mean.

A Vocabulary is plain data that has been checked (metadata.py builds it from the keys of a GGUF
file), so everything behind it may trust ids, lengths and kinds without looking again.
"""

from enum import IntEnum
from typing import Literal, TypeAlias

from msgspec import Struct

# SentencePiece with scores; byte-level BPE with merges; WordPiece.
Model: TypeAlias = Literal["llama", "gpt2", "bert"]


class TokenType(IntEnum):
    """As GGUF numbers them."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Found as a whole in a text before anything else is; the first even where specials are not parsed.
MATCHED_ALWAYS = (TokenType.USER_DEFINED,)
MATCHED_IF_PARSED = (TokenType.USER_DEFINED, TokenType.CONTROL, TokenType.UNKNOWN)
HIDDEN = (TokenType.CONTROL, TokenType.UNKNOWN)  # yield no text unless specials are shown
# What ordinary text may become: a prompt that spells out a control token must not turn into it.
FROM_TEXT = (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)


class VocabularyError(ValueError):
    """A tokenizer that cannot be used: which key is at fault, why, and what helps."""

    def __init__(self, key: str, problem: str, remedy: str) -> None:
        super().__init__(f"{key}: {problem}; {remedy}")
        self.key = key


class SpecialIds(Struct, frozen=True, gc=False, omit_defaults=True):
    """Tokens with a meaning to the server; None where the file names none."""

    bos: int | None = None
    eos: int | None = None
    eot: int | None = None  # end of a turn
    eom: int | None = None  # end of a message that expects a tool's answer
    unk: int | None = None
    pad: int | None = None
    sep: int | None = None  # between two texts of one prompt, and behind the last
    fim_pre: int | None = None  # fill in the middle: prefix, suffix, middle
    fim_suf: int | None = None
    fim_mid: int | None = None
    fim_pad: int | None = None
    fim_rep: int | None = None  # a repository's name follows
    fim_sep: int | None = None  # the next file follows


class Vocabulary(Struct, frozen=True, gc=False):
    """A tokenizer's description.  Token ids index `tokens`, `types` and, for SPM, `scores`."""

    model: Model
    pre: str  # the pre-tokenizer's kind; "default" where the model has none
    tokens: tuple[str, ...]
    types: tuple[TokenType, ...]
    scores: tuple[float, ...] = ()  # SPM only
    merges: tuple[str, ...] = ()  # BPE only: "left right", the most wanted first
    special: SpecialIds = SpecialIds()
    end_ids: tuple[int, ...] = ()  # ascending; generation ends with any of them
    strip_after: tuple[int, ...] = ()  # blanks behind these tokens vanish when a text is encoded
    add_bos: bool = False
    add_eos: bool = False
    add_sep: bool = False
    add_space_prefix: bool = False
    lowercase: bool = False  # WordPiece only, as is the next
    strip_accents: bool = False
    chat_template: str | None = None
    chat_template_tools: str | None = None  # used instead when a request carries tools
    rerank_template: str | None = None  # a ranking prompt around {query} and {document}
    notes: tuple[str, ...] = ()  # what was odd about the file but can be lived with
