"""Goal: a tokenizer's keys become a Vocabulary that can be trusted, or an error that helps.

Method: a small valid set of keys, changed in one place at a time; and arbitrary values at all keys.
"""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vocabularies import CONTROLS, bpe_metadata, changed

from phaseloop.text.metadata import vocabulary_of
from phaseloop.text.vocabulary import SpecialIds, TokenType, Vocabulary, VocabularyError

SPM_TOKENS = ["<unk>", "<s>", "</s>", "<0x00>", "<0x0A>", "▁", "a", "▁a"]
SPM_TYPES = [2, 3, 3, 6, 6, 1, 1, 1]
SPM_SCORES = [0.0, 0.0, 0.0, 0.0, 0.0, -1.0, -2.0, -3]


def spm_metadata(**changes):
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": SPM_TOKENS,
        "tokenizer.ggml.token_type": SPM_TYPES,
        "tokenizer.ggml.scores": SPM_SCORES,
    }
    return changed(metadata, changes)


def test_a_bpe_file():
    metadata = bpe_metadata(pre="llama-bpe", padding_token_id=3)
    metadata["tokenizer.chat_template"] = "{{ messages }}"
    metadata["tokenizer.chat_template.tool_use"] = "{{ tools }}"
    vocabulary = vocabulary_of(metadata)
    first = len(vocabulary.tokens) - len(CONTROLS) - 1
    assert vocabulary.model == "gpt2"
    assert vocabulary.pre == "llama-bpe"
    assert vocabulary.tokens == tuple(metadata["tokenizer.ggml.tokens"])
    assert vocabulary.merges == tuple(metadata["tokenizer.ggml.merges"])
    assert vocabulary.scores == ()
    assert vocabulary.types[first - 1 : first + 1] == (TokenType.NORMAL, TokenType.CONTROL)
    assert vocabulary.special == SpecialIds(bos=first, eos=first + 1, eot=first + 3, pad=3)
    assert vocabulary.end_ids == (first + 1, first + 3)
    assert vocabulary.add_bos  # this kind's habit, when the file is silent
    assert not vocabulary.add_eos
    assert not vocabulary.add_space_prefix
    assert vocabulary.chat_template == "{{ messages }}"
    assert vocabulary.chat_template_tools == "{{ tools }}"
    assert vocabulary.notes == ()


def test_a_sentencepiece_file():
    vocabulary = vocabulary_of(spm_metadata())
    assert vocabulary.model == "llama"
    assert vocabulary.scores == (0.0, 0.0, 0.0, 0.0, 0.0, -1.0, -2.0, -3.0)
    assert vocabulary.types == tuple(map(TokenType, SPM_TYPES))
    assert vocabulary.special == SpecialIds(bos=1, eos=2, unk=0)
    assert vocabulary.end_ids == (2,)
    assert vocabulary.add_bos
    assert vocabulary.add_space_prefix
    assert not vocabulary_of(spm_metadata(add_bos_token=False)).add_bos
    assert not vocabulary_of(spm_metadata(add_space_prefix=False)).add_space_prefix


def test_numbers_may_come_as_arrays():
    types = np.array(SPM_TYPES, np.int32)
    scores = np.array(SPM_SCORES, np.float32)
    assert vocabulary_of(spm_metadata(token_type=types, scores=scores)) == (
        vocabulary_of(spm_metadata())
    )
    assert vocabulary_of(spm_metadata(add_eos_token=True)).add_eos


def test_what_a_file_says_goes_before_habits():
    assert not vocabulary_of(bpe_metadata(pre="llama-bpe", add_bos_token=False)).add_bos
    assert vocabulary_of(bpe_metadata(pre="gpt-2", add_bos_token=True)).add_bos
    assert not vocabulary_of(bpe_metadata(pre="gpt-2")).add_bos
    assert vocabulary_of(bpe_metadata(eot_token_id=5)).special.eot == 5
    assert 5 in vocabulary_of(bpe_metadata(eot_token_id=5)).end_ids
    assert vocabulary_of(bpe_metadata(prefix_token_id=7)).special.fim_pre == 7
    both = vocabulary_of(bpe_metadata(prefix_token_id=7, fim_pre_token_id=8))
    assert both.special.fim_pre == 8


def test_without_types_bytes_are_known_by_their_form():
    vocabulary = vocabulary_of(spm_metadata(token_type=None, add_bos_token=False))
    assert vocabulary.types[3] == TokenType.BYTE  # byte 0, too
    assert vocabulary.types[4] == TokenType.BYTE
    assert vocabulary.types[5] == TokenType.NORMAL


def test_a_type_that_nobody_knows_counts_as_unused():
    vocabulary = vocabulary_of(spm_metadata(token_type=[2, 3, 3, 6, 6, 1, 0, 99]))
    assert vocabulary.types[6:] == (TokenType.UNUSED, TokenType.UNUSED)


def test_oddities_that_can_be_lived_with_are_noted():
    vocabulary = vocabulary_of(bpe_metadata(pre=None))
    assert vocabulary.pre == "default"
    assert "tokenizer.ggml.pre is missing" in vocabulary.notes[0]
    vocabulary = vocabulary_of(spm_metadata(tokens=[*SPM_TOKENS[:6], "", "a"]))
    assert vocabulary.tokens[6] == "[EMPTY_6]"
    assert "1 tokens are empty" in vocabulary.notes[0]


ENDS_OF_MODELS = {
    "chatml": (("<|im_start|>", "<|im_end|>", "<|endoftext|>"), {"<|im_end|>", "<|endoftext|>"}),
    "llama 3": (("<|eot_id|>", "<|eom_id|>"), {"<|eot_id|>", "<|eom_id|>"}),
    "gemma": (("<start_of_turn>", "<end_of_turn>"), {"<end_of_turn>"}),
    "files": (
        ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
        {"<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"},
    ),
    "harmony": (("<|end|>", "<|return|>", "<|call|>"), {"<|return|>", "<|call|>"}),
    "end alone": (("<|end|>",), {"<|end|>"}),
}


@pytest.mark.parametrize(("tokens", "ends"), ENDS_OF_MODELS.values(), ids=ENDS_OF_MODELS)
def test_what_ends_an_answer_is_known_by_its_text(tokens, ends):
    count = len(SPM_TOKENS)
    vocabulary = vocabulary_of(
        spm_metadata(
            tokens=[*SPM_TOKENS, *tokens],
            token_type=SPM_TYPES + [TokenType.NORMAL] * len(tokens),
            scores=SPM_SCORES + [0.0] * len(tokens),
        )
    )
    found = {vocabulary.tokens[token] for token in vocabulary.end_ids if token >= count}
    assert found == ends
    assert list(vocabulary.end_ids) == sorted(vocabulary.end_ids)
    for text in ends:  # such a token is control, whatever the file says
        assert vocabulary.types[vocabulary.tokens.index(text)] == TokenType.CONTROL


def test_only_one_family_swallows_blanks_behind_special_tokens():
    metadata = spm_metadata()
    assert vocabulary_of(metadata).strip_after == ()
    metadata["general.name"] = "Phi-3 mini"
    assert vocabulary_of(metadata).strip_after == (2,)  # </s>, but neither <unk> nor <s>


BROKEN = {
    "no model": (spm_metadata(model=None), "model", "missing"),
    "another model": (spm_metadata(model="t5"), "model", "'t5' is not supported"),
    "model is a number": (spm_metadata(model=3), "model", "3 is not a text"),
    "no tokens": (spm_metadata(tokens=None), "tokens", "missing"),
    "tokens are a text": (spm_metadata(tokens="abc"), "tokens", "not an array"),
    "a token is a number": (spm_metadata(tokens=["a", 7]), "tokens", "entry 1, 7, is no str"),
    "a token twice": (spm_metadata(tokens=[*SPM_TOKENS[:7], "▁"]), "tokens", "5 and token 7"),
    "too few types": (spm_metadata(token_type=[1]), "token_type", "1 entries for 8 tokens"),
    "a type is true": (spm_metadata(token_type=[True] * 8), "token_type", "entry 0, True"),
    "no byte": (spm_metadata(token_type=[6] * 8), "token_type", "'<unk>' is typed as a byte"),
    "no scores": (spm_metadata(scores=None), "scores", "missing"),
    "too many scores": (spm_metadata(scores=[0.0] * 9), "scores", "9 entries for 8 tokens"),
    "a score is a text": (spm_metadata(scores=["x"] * 8), "scores", "entry 0, 'x'"),
    "a score is no number": (spm_metadata(scores=[math.nan] * 8), "scores", "token 0 has"),
    "an id too high": (spm_metadata(bos_token_id=8), "bos_token_id", "8 is no token"),
    "an id below zero": (spm_metadata(eos_token_id=-1), "eos_token_id", "-1 is no token"),
    "a huge id": (spm_metadata(eot_token_id=1 << 70), "eot_token_id", "a huge number"),
    "an id is a text": (spm_metadata(padding_token_id="1"), "padding_token_id", "'1' is not"),
    "a flag is a number": (spm_metadata(add_bos_token=1), "add_bos_token", "neither true"),
    "an unknown kind": (bpe_metadata(pre="llama-bqe"), "pre", "the nearest known is 'llama-bpe'"),
    "no merges": (bpe_metadata(merges=None), "merges", "missing"),
    "a merge of one": (bpe_metadata(merges=["a b", "ab"]), "merges", "entry 1, 'ab'"),
    "a merge of three": (bpe_metadata(merges=["a b c"]), "merges", "entry 0"),
    "a merge of nothing": (bpe_metadata(merges=[" b"]), "merges", "entry 0"),
    "no bos to add": (
        bpe_metadata(add_bos_token=True, bos_token_id=None),
        "bos_token_id",
        "add_bos_token asks for this token",
    ),
    "no eos to add": (
        bpe_metadata(add_eos_token=True, eos_token_id=None),
        "eos_token_id",
        "add_eos_token asks for this token",
    ),
}


@pytest.mark.parametrize(("metadata", "key", "problem"), BROKEN.values(), ids=BROKEN)
def test_each_fault_is_named_with_its_key_and_a_remedy(metadata, key, problem):
    with pytest.raises(VocabularyError) as caught:
        vocabulary_of(metadata)
    assert caught.value.key == f"tokenizer.ggml.{key}"
    message = str(caught.value)
    assert message.startswith(f"tokenizer.ggml.{key}: ")
    assert problem in message
    assert "; " in message  # the remedy
    assert len(message) < 800
    assert message.isprintable()


def test_a_message_shows_little_and_nothing_odd_of_a_hostile_value():
    with pytest.raises(VocabularyError) as caught:
        vocabulary_of(spm_metadata(model="\x1b[31m" + "x" * 10_000))
    assert len(str(caught.value)) < 300
    assert str(caught.value).isprintable()


KEYS = sorted(
    {*bpe_metadata(), *spm_metadata(), "general.name", "tokenizer.chat_template"}
    | {f"tokenizer.ggml.{role}_token_id" for role in ("eot", "unknown", "fim_sep", "middle")}
    | {f"tokenizer.ggml.add_{what}" for what in ("bos_token", "eos_token", "space_prefix")}
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
VALUES = (
    SCALARS
    | st.sampled_from(["llama", "gpt2", "default"])
    | st.lists(SCALARS, max_size=8)
    | st.lists(st.text(max_size=3), max_size=8)
    | st.lists(st.integers(0, 7), min_size=8, max_size=8)
)


@given(
    st.sampled_from([bpe_metadata(), spm_metadata()]),
    st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=4),
)
def test_arbitrary_values_are_taken_or_refused(valid, changes):
    try:
        vocabulary = vocabulary_of({**valid, **changes})
    except VocabularyError:
        return
    assert isinstance(vocabulary, Vocabulary)
    assert len(vocabulary.types) == len(vocabulary.tokens) == len(set(vocabulary.tokens))
    assert all(0 <= token < len(vocabulary.tokens) for token in vocabulary.end_ids)
