"""Goal: streamed text is the decoding of all tokens, never cut within a character, never stuck.

Method: arbitrary bytes as tokens of one byte each, fed in arbitrary portions.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vocabularies import bpe_tokenizer

from phaseloop.text.bpe import CHARACTER_OF
from phaseloop.text.detokenizer import Detokenizer

TOKENIZER = bpe_tokenizer()
ID_OF = {text: token for token, text in enumerate(TOKENIZER.vocabulary.tokens)}
PORTIONS = st.lists(st.binary(max_size=6), max_size=12)
PARTS = ("é".encode(), "世".encode(), "👍".encode()[:3], b"a", b"\xf0\x9f")
BROKEN = (b"\xff", b"\xed", b"\xed\xa0", b"\xe0\x80", b"\xf4\x90")
NEARLY_TEXT = st.lists(st.sampled_from((*PARTS, *BROKEN)))


def tokens_of(raw):
    return [ID_OF[CHARACTER_OF[byte]] for byte in raw]


@given(PORTIONS | NEARLY_TEXT)
def test_joined_it_is_the_decoding_of_all(portions):
    stream = Detokenizer(TOKENIZER)
    texts = [stream.push(tokens_of(portion)) for portion in portions]
    whole = b"".join(portions)
    assert "".join(texts) + stream.finish() == whole.decode(errors="replace")


@given(PORTIONS | NEARLY_TEXT)
def test_only_what_may_still_become_a_character_is_held(portions):
    stream = Detokenizer(TOKENIZER)
    sent, shown = b"", ""
    for portion in portions:
        shown += stream.push(tokens_of(portion))
        sent += portion
        # Held is the shortest tail without which the bytes decode to what was shown.
        held = next(n for n in range(4) if sent[: len(sent) - n].decode(errors="replace") == shown)
        tail = sent[len(sent) - held :]
        assert not held or could_be_completed(tail)


def could_be_completed(tail):
    """Whether some bytes make a character of it: not an error before its end."""
    try:
        tail.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return False


@pytest.mark.parametrize("text", ["é", "世", "👍", "👩‍👧", "a👍b"])
def test_each_character_comes_with_its_last_byte(text):
    stream = Detokenizer(TOKENIZER)
    out = [stream.push(tokens_of(bytes([byte]))) for byte in text.encode()]
    assert "".join(out) == text
    assert all(part in ("", *text) for part in out)
    assert stream.finish() == ""


def test_a_broken_character_is_given_up_at_once_when_it_cannot_be_completed():
    stream = Detokenizer(TOKENIZER)
    assert stream.push(tokens_of(b"\xf0\x9f")) == ""
    assert stream.push(tokens_of(b"a")) == "\ufffda"
    assert stream.push(tokens_of(b"\xff\xfe")) == "\ufffd\ufffd"
    assert stream.push(tokens_of(b"\xe4\xb8")) == ""
    assert stream.finish() == "\ufffd"
    assert stream.push(tokens_of(b"a")) == "a"  # as new


def test_control_tokens_are_hidden_or_shown():
    tokens = TOKENIZER.encode("<|im_start|>hi", parse_special=True)
    assert Detokenizer(TOKENIZER).push(tokens) == "hi"
    assert Detokenizer(TOKENIZER, special=True).push(tokens) == "<|im_start|>hi"


def test_a_hidden_token_within_a_character_does_not_break_it():
    half, rest = tokens_of("é".encode())
    stream = Detokenizer(TOKENIZER)
    assert stream.push([half, ID_OF["<|im_end|>"]]) == ""
    assert stream.push([rest]) == "é"
