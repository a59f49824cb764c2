"""Goal: WordPiece as BERT models were trained with it, from the keys of a GGUF file.

Method: the `tokenizers` library is an independent implementation of the same rules; a vocabulary
is learnt with it, written the way GGUF files have it, and both must cut the same texts alike.  What
the keys mean is stated by hand.
"""

import json
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Reference
from tokenizers import models, normalizers, pre_tokenizers, trainers
from vocabularies import CORPUS, TEXTS, TYPE_CONTROL, TYPE_NORMAL, TYPE_UNKNOWN, changed

from phaseloop.text.metadata import vocabulary_of
from phaseloop.text.tokenizer import Tokenizer
from phaseloop.text.vocabulary import VocabularyError

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD, UNKNOWN, CLS, SEP, MASK = range(5)


@cache
def reference(lowercase: bool = True) -> Reference:
    made = Reference(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=260, special_tokens=list(SPECIAL), show_progress=False
    )
    made.train_from_iterator([CORPUS] * 3, trainer)
    return made


def metadata_of(lowercase: bool = True, **changes: object) -> dict[str, object]:
    vocabulary = json.loads(reference(lowercase).to_str())["model"]["vocab"]
    texts = sorted(vocabulary, key=vocabulary.__getitem__)
    pieces = [text[2:] if text.startswith("##") else f"▁{text}" for text in texts[len(SPECIAL) :]]
    types = [TYPE_CONTROL] * len(SPECIAL) + [TYPE_NORMAL] * len(pieces)
    types[UNKNOWN] = TYPE_UNKNOWN
    metadata = {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": [*SPECIAL, *pieces],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": CLS,
        "tokenizer.ggml.unknown_token_id": UNKNOWN,
        "tokenizer.ggml.seperator_token_id": SEP,
        "tokenizer.ggml.padding_token_id": PAD,
    }
    return changed(metadata, changes)


@cache
def tokenizer(lowercase: bool = True) -> Tokenizer:
    changes = {} if lowercase else {"normalizer.lowercase": False}
    return Tokenizer(vocabulary_of(metadata_of(lowercase, **changes)))


def both(text: str, lowercase: bool = True) -> tuple[list[int], list[int]]:
    found = tokenizer(lowercase).encode(text)
    return list(found), reference(lowercase).encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize(
    "text",
    [
        CORPUS,
        "",
        " \t\n",
        "Don't stop-believing, (really)... $5^2 ~ `x` |y| <z> a+b=c",
        "naïve CAFÉ Ärger İstanbul ΑΣ ẞ",
        "e\u0301 vs \xe9; a\u200db\u200cc; x\xady; a\xa0b\u3000c\u2003d",
        "你好world世界 カタカナ 한국어 \u3400\U00020000",
        "a\x00b\x1fc\ufffdd\x85e",
        "¿qué? «oui» “quoted” — dash…",
        "the" * 33 + "t",  # 100 characters
        "the" * 34,  # 102: unknown as a whole
        "▁the a▁the",
    ],
)
def test_texts_are_cut_as_by_the_library(text, lowercase):
    found, expected = both(text, lowercase)
    assert found == expected


@given(TEXTS, st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_text_is_cut_as_by_the_library(text, lowercase):
    found, expected = both(text, lowercase)
    assert found == expected


def test_accents_and_capitals_are_told_apart_where_the_file_says_so():
    kept = Tokenizer(vocabulary_of(metadata_of(**{"normalizer.strip_accents": False})))
    assert tokenizer().encode("café") == tokenizer().encode("CAFE")
    assert kept.encode("café") == kept.encode("CAFÉ") != kept.encode("cafe")
    cased = tokenizer(False)
    assert cased.encode("The") != cased.encode("the")


def test_a_prompt_begins_with_cls_and_ends_with_sep():
    inner = tokenizer().encode("the lazy dog")
    assert tokenizer().encode("the lazy dog", add_special=True) == (CLS, *inner, SEP)
    assert tokenizer().encode("", add_special=True) == (CLS, SEP)
    bare = Tokenizer(vocabulary_of(metadata_of(add_bos_token=False, add_sep_token=False)))
    assert bare.encode("the lazy dog", add_special=True) == inner


def test_spelt_out_specials_are_tokens_only_where_they_are_parsed():
    assert tokenizer().encode("[MASK]", parse_special=True) == (MASK,)
    assert MASK not in tokenizer().encode("[MASK]")


def test_words_come_back_with_blanks_before_them():
    assert tokenizer().decode(tokenizer().encode("The lazy dog")) == " the lazy dog"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"seperator_token_id": None}, "seperator_token_id: missing, but tokenizer.ggml.add_sep"),
        ({"seperator_token_id": 10**6}, "seperator_token_id: 1000000 is no token"),
        ({"bos_token_id": "[CLS]"}, "bos_token_id: '.CLS.' is not a token id"),
        ({"add_sep_token": 1}, "add_sep_token"),
        ({"normalizer.lowercase": "yes"}, "normalizer.lowercase"),
        ({"normalizer.strip_accents": 2.5}, "normalizer.strip_accents"),
        ({"tokens": None}, "tokens: missing or empty"),
    ],
)
def test_broken_keys_are_refused_by_name(changes, problem):
    metadata = metadata_of(**changes)
    if changes == {"seperator_token_id": None}:  # a small vocabulary has no token 102 to mean it
        for key in ("tokens", "token_type"):
            metadata[f"tokenizer.ggml.{key}"] = metadata[f"tokenizer.ggml.{key}"][:100]
    with pytest.raises(VocabularyError, match=problem):
        vocabulary_of(metadata)
