"""Goal: a DRY breaker is found wherever its string may lie in a vocabulary's tokens.

Method: by hand over a byte-level vocabulary, and hypothesis against a search place by place, as
llama.cpp describes it.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vocabularies import CONTROLS, bpe_tokenizer

from phaseloop.text.breakers import STRING_BYTES_MAX, TAIL_LENGTH_MAX, breakers

TOKENIZER = bpe_tokenizer()
COUNT = len(TOKENIZER.vocabulary.tokens)
PIECES = [TOKENIZER.piece(token) for token in range(COUNT)]


def test_a_character_breaks_in_every_token_that_has_it():
    found = breakers(TOKENIZER, ("\n",))
    assert found == tuple((token, ()) for token in range(COUNT) if b"\n" in PIECES[token])
    assert len(found) >= 1


def test_a_string_over_two_tokens_has_a_tail():
    """Nothing of the corpus joins q and z, so these are tokens of their own."""
    (q,), (z,) = TOKENIZER.encode("q"), TOKENIZER.encode("z")
    assert not any(b"qz" in piece for piece in PIECES)
    assert set(breakers(TOKENIZER, ("qz",))) == {
        (token, (z,)) for token in range(COUNT) if PIECES[token].endswith(b"q")
    }
    assert (q, (z,)) in breakers(TOKENIZER, ("qz",))


def test_control_tokens_count_by_their_names():
    assert {token for token, tail in breakers(TOKENIZER, ("<|im",)) if not tail} == {
        token for token in range(COUNT) if PIECES[token].decode(errors="replace") in CONTROLS[2:]
    }


def test_strings_are_joined_and_sorted():
    both = breakers(TOKENIZER, (":", "\n", ":"))
    assert both == tuple(sorted({*breakers(TOKENIZER, ("\n",)), *breakers(TOKENIZER, (":",))}))


@pytest.mark.parametrize("strings", [(), ("",), ("", "\ud800")])
def test_nothing_to_break_at(strings):
    assert breakers(TOKENIZER, strings) == ()


def test_long_strings_are_cut():
    long = "qz" * STRING_BYTES_MAX
    found = breakers(TOKENIZER, (long,))
    assert found == breakers(TOKENIZER, (long[:STRING_BYTES_MAX],))
    assert max(len(tail) for _, tail in found) == TAIL_LENGTH_MAX


def slow(raw):
    """Every place of every piece where the string may begin."""
    for token, piece in enumerate(PIECES):
        if raw in piece:
            yield token, ()
            continue
        for place in range(len(piece)):
            shared = len(piece) - place
            if shared < len(raw) and piece[place:] == raw[:shared]:
                tail = TOKENIZER.encode(raw[shared:].decode(errors="replace"))
                yield token, tail[:TAIL_LENGTH_MAX]


WORDS = ["the", " the", "Größe", "\r\n\t", "...", "世界", "aaa", "ther", "e-", " d", "👍"]


@given(st.one_of(st.sampled_from(WORDS), st.text(st.sampled_from("thelay ß世.\n"), max_size=6)))
def test_as_place_by_place(string):
    raw = string.encode()
    assert breakers(TOKENIZER, (string,)) == (tuple(sorted(set(slow(raw)))) if raw else ())
