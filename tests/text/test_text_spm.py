"""Goal: SentencePiece's merges by score, with bytes for what has no token.

Method: random small vocabularies, and an oracle that looks at all pairs of the whole text after
each merge, knowing nothing of words.
"""

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from vocabularies import ANY_TEXT, TYPE_BYTE, TYPE_CONTROL, TYPE_NORMAL, TYPE_UNKNOWN

from phaseloop.text.metadata import vocabulary_of
from phaseloop.text.tokenizer import Tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPECIAL = ["<unk>", "<s>", "</s>"]


def spm_tokenizer(scores, *, has_bytes=True, controls=(), **changes):
    """A tokenizer of the tokens in `scores`; ids are those of SPECIAL, BYTES, then of `scores`."""
    row = [(SPECIAL[0], TYPE_UNKNOWN, 0.0), *((text, TYPE_CONTROL, 0.0) for text in SPECIAL[1:])]
    row += [(text, TYPE_BYTE, 0.0) for text in BYTES] if has_bytes else []
    row += [(text, TYPE_NORMAL, score) for text, score in scores.items()]
    row += [(text, TYPE_CONTROL, 0.0) for text in controls]
    texts, types, values = map(list, zip(*row, strict=True))
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": values,
    }
    metadata |= {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    return Tokenizer(vocabulary_of(metadata))


def naive(text, scores):
    """The texts of the tokens, bytes written as <0x..>."""
    symbols = list(text.replace(" ", "▁"))
    while True:
        pairs = [left + right for left, right in pairwise(symbols)]
        ranked = [(-scores[pair], place) for place, pair in enumerate(pairs) if pair in scores]
        if not ranked:
            break
        _, place = min(ranked)
        symbols[place : place + 2] = [pairs[place]]
    out = []
    for symbol in symbols:
        out += [symbol] if symbol in scores else [BYTES[byte] for byte in symbol.encode()]
    return out


SCORES = st.dictionaries(
    st.text("ab▁é", min_size=1, max_size=5), st.integers(-6, 0).map(float), max_size=25
)


@given(st.text("ab é", max_size=24), SCORES)
@example("a b", {"a▁b": -1.0, "a▁": -2.0, "▁": 0.0})
@example("a  b a b", {"b▁": -1.0, "▁a": 0.0, "▁▁": -1.0})
@example("aaaa", {"aa": 0.0, "aaa": 0.0})
def test_like_looking_at_all_pairs_of_the_whole_text(text, scores):
    tokenizer = spm_tokenizer(scores, add_space_prefix=False)
    tokens = tokenizer.vocabulary.tokens
    assert [tokens[token] for token in tokenizer.encode(text)] == naive(text, scores)


@given(ANY_TEXT.filter(lambda text: "▁" not in text))
def test_every_text_comes_back(text):
    tokenizer = spm_tokenizer({"a": -1.0, "▁": -2.0, "▁a": -3.0, "aa": 0.0}, add_space_prefix=False)
    assert tokenizer.decode(tokenizer.encode(text)) == text


WORDS = {"▁": -5.0, "a": -4.0, "▁a": -1.0, "b": -4.0}


def test_a_blank_goes_before_the_text_and_behind_special_tokens():
    tokenizer = spm_tokenizer(WORDS, controls=["<x>"])
    tokens = tokenizer.vocabulary.tokens

    def texts(text, **options):
        return [tokens[token] for token in tokenizer.encode(text, **options)]

    assert texts("a") == ["▁a"]
    assert texts("a<x>ab", parse_special=True) == ["▁a", "<x>", "▁a", "b"]
    assert texts("a", add_special=True) == ["<s>", "▁a"]
    assert texts("", add_special=True) == ["<s>"]
    assert tokenizer.decode(tokenizer.encode("a")) == " a"


def test_without_that_habit_no_blank_is_added():
    tokenizer = spm_tokenizer(WORDS, add_space_prefix=False, add_bos_token=False)
    tokens = tokenizer.vocabulary.tokens
    assert [tokens[token] for token in tokenizer.encode("a", add_special=True)] == ["a"]


@pytest.mark.parametrize("text", ["<s>", "</s>", "<unk>", "<0x41>"])
def test_text_never_becomes_a_control_or_byte_token_by_its_name(text):
    """Though all the merges that would lead there exist."""
    letters = dict.fromkeys("<>/sunk0x41▁", -9.0)
    steps = {text[:length]: 0.0 for length in range(2, len(text))}
    tokenizer = spm_tokenizer(letters | steps, add_space_prefix=False)
    encoded = tokenizer.encode(text)
    assert tokenizer.decode(encoded) == text
    assert not set(encoded) & set(range(len(SPECIAL) + len(BYTES)))


@pytest.mark.parametrize("controls", [(), BYTES])
def test_a_character_that_cannot_even_be_bytes_is_unknown(controls):
    """A control token that looks like a byte is none."""
    tokenizer = spm_tokenizer(WORDS, has_bytes=False, controls=controls, add_space_prefix=False)
    tokens = tokenizer.vocabulary.tokens
    assert [tokens[token] for token in tokenizer.encode("a世b")] == ["a", "<unk>", "b"]


@pytest.mark.parametrize("unit", ["a", " ", "ab", "a ", "é"])
def test_long_texts_are_encoded_like_short_ones(unit):
    """In a time that the suite's limit would notice if it squared."""
    scores = {"▁" * length: float(-length) for length in range(1, 17)} | WORDS
    tokenizer = spm_tokenizer(scores, add_space_prefix=False)
    assert tokenizer.decode(tokenizer.encode(unit * 30_000)) == unit * 30_000
