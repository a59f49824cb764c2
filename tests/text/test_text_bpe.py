"""Goal: byte-level BPE gives the tokens that the models were trained with.

Method: the `tokenizers` package with the same merges and each family's cut as its tokenizer.json
states it; and the round trip of every text.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Reference
from vocabularies import ANY_TEXT, CORPUS, TEXTS, bpe_tokenizer, trained

from phaseloop.text import bpe
from phaseloop.text.pretokenizers import PRE_TOKENIZERS, splitter
from phaseloop.text.words import WordCache

BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
ORIGINALS: dict[str, list[str]] = {
    "gpt-2": [GPT2],
    "smollm": [r"\p{N}", GPT2],
    "llama-bpe": [
        SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + BLANKS
    ],
    "qwen2": [SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + BLANKS],
    "qwen35": [
        SHORT + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + BLANKS
    ],
    "tekken": [f"{CASED[0]}|{CASED[1]}|\\p{{N}}|{OTHERS}|{BLANKS}"],
    "gpt-4o": [f"{CASED[0]}{SHORT}?|{CASED[1]}{SHORT}?|\\p{{N}}{{1,3}}|{OTHERS}|{BLANKS}"],
}


def reference(pre, *, whole_words):
    tokens, merges = trained()
    model = models.BPE(
        {text: token for token, text in enumerate(tokens)},
        [tuple(pair.split(" ")) for pair in merges],
        ignore_merges=whole_words,
    )
    made = Reference(model)
    cuts = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in ORIGINALS[pre]]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes])
    return made


PAIRS = {
    pre: (
        bpe_tokenizer(pre=pre),
        reference(pre, whole_words=PRE_TOKENIZERS[pre].whole_words),
    )
    for pre in ORIGINALS
}


@pytest.mark.parametrize("pre", ORIGINALS)
@settings(max_examples=150)
@given(text=TEXTS)
def test_like_the_reference(pre, text):
    ours, theirs = PAIRS[pre]
    assert list(ours.encode(text)) == theirs.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("pre", ORIGINALS)
def test_like_the_reference_on_a_corpus(pre):
    ours, theirs = PAIRS[pre]
    assert list(ours.encode(CORPUS)) == theirs.encode(CORPUS, add_special_tokens=False).ids


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
@settings(max_examples=30)
@given(text=ANY_TEXT)
def test_a_text_falls_into_pieces_without_loss(pre, text):
    pieces = splitter(pre)(text)
    assert "".join(pieces) == text
    assert all(pieces)


CUTS = {
    "llama-bpe": ("I'LL pay 12345 €!\n", ["I", "'LL", " pay", " ", "123", "45", " €!\n"]),
    "qwen2": ("x 123", ["x", " ", "1", "2", "3"]),
    "qwen35": ("e\u0301a", ["e\u0301a"]),
    "smollm": ("a 12", ["a", " ", "1", "2"]),
    "gpt-2": ("don't  stop", ["don", "'t", " ", " stop"]),
    "tekken": ("XMLHttp/ÀÉÎz", ["XMLHttp", "/ÀÉÎz"]),
    "gpt-4o": ("CamelCase's", ["Camel", "Case's"]),
    "deepseek-v3": ("1234你好ab\u0000", ["123", "4", "你好", "ab", "\0"]),
    "deepseek-coder": ("a1b 你", ["a", "1", "b", " ", "你"]),
    "falcon": ("a+b 1234", ["a", "+", "b", " ", "123", "4"]),
    "default": ("a+b 1234", ["a", "+", "b", " ", "123", "4"]),
}


@pytest.mark.parametrize(("pre", "text", "pieces"), [(k, *v) for k, v in CUTS.items()], ids=CUTS)
def test_how_each_kind_cuts(pre, text, pieces):
    assert splitter(pre)(text) == pieces


def test_a_long_s_is_no_s():
    """Ignoring case by Unicode's rules would make a contraction of it."""
    assert splitter("llama-bpe")("it'\u017fo") == ["it", "'\u017fo"]


@given(ANY_TEXT)
def test_every_text_comes_back(text):
    tokenizer = PAIRS["qwen2"][0]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_whole_word_goes_before_merges_where_the_kind_says_so():
    """The same merges reach `ab` + `c`, but the word itself is a token."""
    tokens = [bpe.CHARACTER_OF[byte] for byte in range(256)] + ["bc", "abc", "<s>"]
    changes = {"tokens": tokens, "token_type": None, "merges": ["b c"], "bos_token_id": 258}
    changes["eos_token_id"] = 258
    whole = bpe_tokenizer(pre="llama-bpe", **changes).encode("abc")
    merged = bpe_tokenizer(pre="qwen2", **changes).encode("abc")
    assert whole == (257,)
    assert merged == (tokens.index("a"), 256)


def test_a_merge_may_pass_through_what_is_no_token():
    tokens = [bpe.CHARACTER_OF[byte] for byte in range(256)] + ["abc"]
    changes = {"tokens": tokens, "token_type": None, "merges": ["a b", "ab c"]}
    changes |= {"bos_token_id": None, "eos_token_id": None}
    tokenizer = bpe_tokenizer(**changes)
    assert tokenizer.encode("abc") == (256,)
    assert tokenizer.encode("abx") == tuple(tokens.index(text) for text in "abx")


def test_bytes_that_the_vocabulary_lacks_are_left_out():
    tokens = [bpe.CHARACTER_OF[byte] for byte in range(256) if byte != ord("b")]
    changes = {"tokens": tokens, "token_type": None, "merges": ["a c"]}
    changes |= {"bos_token_id": None, "eos_token_id": None}
    assert bpe_tokenizer(**changes).decode(bpe_tokenizer(**changes).encode("abc")) == "ac"


def test_the_cache_of_words_is_bounded_and_harmless():
    asked = []

    def lengths(word):
        asked.append(word)
        return (len(word),)

    cache = WordCache(lengths, words_max=3, length_max=4)
    words = ["a", "bb", "a", "ccc", "dddd", "a", "too long", "too long"]
    assert cache.encode(words) == [len(word) for word in words]
    assert len(cache) == 2  # emptied when the fourth came
    assert asked == ["a", "bb", "ccc", "dddd", "a", "too long", "too long"]
    assert cache.encode(["a", "dddd"]) == [1, 4]
    assert len(asked) == 7


@settings(max_examples=20)
@given(st.sampled_from(["a", " ", "\n", "1", "!", "A", "\u0301", "ab", " \t", "<|"]))
def test_long_words_are_encoded_like_short_ones(unit):
    """Past the cache's limit, and in a time that the suite's limit would notice if it squared."""
    ours, theirs = PAIRS["llama-bpe"]
    text = unit * 20_000
    assert list(ours.encode(text)) == theirs.encode(text, add_special_tokens=False).ids
