"""Goal: a draft model of other tokens is told apart, by what differs.

Method: vocabularies that differ in one thing each.
"""

import pytest
from msgspec.structs import replace

from phaseloop.text.same_vocabulary import FIRST_COMPARED, PADDING_MAX, difference
from phaseloop.text.vocabulary import SpecialIds, TokenType, Vocabulary

TOKENS = tuple(f"t{token}" for token in range(300))


def vocabulary(tokens=TOKENS, **changes):
    types = (TokenType.NORMAL,) * len(tokens)
    same = Vocabulary("gpt2", "default", tokens, types, special=SpecialIds(bos=1, eos=2))
    return replace(same, **changes)


def test_the_same_is_the_same():
    assert difference(vocabulary(), vocabulary()) is None


def test_padding_and_the_first_tokens_texts_do_not_count():
    padded = vocabulary((*TOKENS, *("[PAD]",) * PADDING_MAX))
    assert difference(vocabulary(), padded) is None
    assert difference(padded, vocabulary()) is None
    renamed = vocabulary((*("<s>",) * FIRST_COMPARED, *TOKENS[FIRST_COMPARED:]))
    assert difference(vocabulary(), renamed) is None


@pytest.mark.parametrize(
    "draft, parts",
    [
        (vocabulary(model="llama"), ("tokenizer is BPE", "draft's SentencePiece")),
        (vocabulary(TOKENS * 2), ("300 tokens", "600")),
        (vocabulary((*TOKENS[:7], "other", *TOKENS[8:])), ("token 7", "'t7'", "'other'")),
        (vocabulary((*TOKENS[:-1], "other")), ("token 299",)),
        (vocabulary(special=SpecialIds(bos=1, eos=3)), ("eos is token 2", "draft's token 3")),
        (vocabulary(special=SpecialIds(eos=2)), ("bos is token 1", "draft's none")),
    ],
)
def test_what_differs_is_named(draft, parts):
    found = difference(vocabulary(), draft)
    assert found is not None
    for part in parts:
        assert part in found
