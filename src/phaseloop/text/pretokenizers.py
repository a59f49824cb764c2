r"""How each family of models cuts a text into words, inside of which byte pairs are merged.

A kind is a list of regular expressions: the first cuts the text into its matches and what lies
between them, the next cuts each of these pieces, and so on.  They are those the models were trained
with, by the names that GGUF files carry in `tokenizer.ggml.pre`.

Contractions list both cases instead of ignoring case, because ignoring it by Unicode's rules would
also take the long s for an s.
"""

from collections.abc import Callable
from functools import cache

import regex
from msgspec import Struct

CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LOWER_WORD = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
UPPER_WORD = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
LEAD = r"[^\r\n\p{L}\p{N}]?"  # one character that may open a word

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{CONTRACTION}|{LEAD}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{BLANKS}"
QWEN2 = rf"{CONTRACTION}|{LEAD}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{BLANKS}"
QWEN35 = (
    rf"{CONTRACTION}|{LEAD}[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{BLANKS}"
)
TEKKEN = rf"{LEAD}{LOWER_WORD}|{LEAD}{UPPER_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{BLANKS}"
GPT4O = (
    rf"{LEAD}{LOWER_WORD}{CONTRACTION}?|{LEAD}{UPPER_WORD}{CONTRACTION}?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{BLANKS}"
)
DEEPSEEK_V3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{BLANKS}"
)
HAN = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"  # as trained, odd as the second range is
HAN_KANA = r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"


class PreTokenizer(Struct, frozen=True, gc=False):
    """A kind: its cuts, and what files of this kind leave unsaid."""

    patterns: tuple[str, ...]
    whole_words: bool = False  # a word that is a token is that token, whatever the merges say
    add_bos: bool = False  # unless the file says otherwise


PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "lfm2", "pixtral", "midm-2.0"),
        PreTokenizer((LLAMA3,), whole_words=True, add_bos=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), PreTokenizer((LLAMA3,))),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "megrez", "kormo", "stablelm2", "hunyuan", "solar-open"),
        PreTokenizer((QWEN2,)),
    ),
    "qwen35": PreTokenizer((QWEN35,)),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        PreTokenizer((r"\p{N}", GPT2)),
    ),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "gigachat", "exaone4", "mellum"),
        PreTokenizer((GPT2,)),
    ),
    "tekken": PreTokenizer((TEKKEN,), whole_words=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), PreTokenizer((GPT4O,))),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", HAN, r"\p{N}")),
    "deepseek-v3": PreTokenizer((r"\p{N}{1,3}", HAN_KANA, DEEPSEEK_V3)),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]")),
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}


@cache
def splitter(pre: str) -> Callable[[str], list[str]]:
    """The function that cuts a text as `pre` says; its pieces joined give the text again."""
    expressions = [regex.compile(f"({pattern})") for pattern in PRE_TOKENIZERS[pre].patterns]

    def split(text: str) -> list[str]:
        pieces = [text]
        for expression in expressions:
            pieces = [cut for piece in pieces for cut in expression.split(piece) if cut]
        return pieces

    return split
