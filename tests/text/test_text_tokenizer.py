"""Goal: special tokens are found, added and shown exactly when asked for.

Method: a small BPE vocabulary with control, user-defined and overlapping tokens; the search for
special tokens is compared with a search that tries every token at every place.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vocabularies import TYPE_CONTROL, TYPE_NORMAL, TYPE_UNUSED, bpe_metadata, bpe_tokenizer

from phaseloop.text.metadata import vocabulary_of
from phaseloop.text.special import SpecialTokens
from phaseloop.text.tokenizer import Tokenizer

TOKENIZER = bpe_tokenizer()
ID_OF = {text: token for token, text in enumerate(TOKENIZER.vocabulary.tokens)}
START, END, TOOL = ID_OF["<|im_start|>"], ID_OF["<|im_end|>"], ID_OF["<tool>"]


def test_control_tokens_are_parsed_only_if_asked():
    text = "<|im_start|>user\n<|im_end|>"
    parsed = TOKENIZER.encode(text, parse_special=True)
    assert parsed[0] == START
    assert parsed[-1] == END
    plain = TOKENIZER.encode(text)
    assert not {START, END} & set(plain)
    assert TOKENIZER.decode(parsed) == TOKENIZER.decode(plain) == text


def test_user_defined_tokens_are_always_found():
    assert TOOL in TOKENIZER.encode("a<tool>b")
    assert TOOL in TOKENIZER.encode("a<tool>b", parse_special=True)


def test_what_the_model_wants_around_a_text():
    bos, eos = ID_OF["<s>"], ID_OF["</s>"]
    both = bpe_tokenizer(add_bos_token=True, add_eos_token=True)
    assert both.encode("", add_special=True) == (bos, eos)
    assert both.encode("a", add_special=True) == (bos, *both.encode("a"), eos)
    assert both.encode("") == ()
    assert TOKENIZER.encode("a", add_special=True) == TOKENIZER.encode("a")


@given(st.text(st.sampled_from("<|>imstar_end/ a"), max_size=40))
def test_no_spelling_of_a_control_token_gets_through_unparsed(text):
    types = TOKENIZER.vocabulary.types
    assert all(types[token] != TYPE_CONTROL for token in TOKENIZER.encode(text))


def test_a_word_that_spells_a_control_token_is_no_control_token():
    """Not even where whole words are looked up before anything else."""
    metadata = bpe_metadata(pre="llama-bpe")
    metadata["tokenizer.ggml.tokens"][-1] = "Control"
    metadata["tokenizer.ggml.token_type"][-1] = TYPE_CONTROL
    tokenizer = Tokenizer(vocabulary_of(metadata))
    control = len(metadata["tokenizer.ggml.tokens"]) - 1
    assert control not in tokenizer.encode("Control")
    assert tokenizer.encode("Control", parse_special=True) == (control,)


def test_pieces_show_control_tokens_only_if_asked():
    assert TOKENIZER.piece(START) == b"<|im_start|>"
    assert TOKENIZER.piece(START, special=False) == b""
    assert TOKENIZER.piece(TOOL, special=False) == b"<tool>"
    text = "<|im_start|>hi <tool>"
    assert (
        TOKENIZER.decode(TOKENIZER.encode(text, parse_special=True), special=False) == "hi <tool>"
    )


def test_pieces_of_unused_and_foreign_tokens():
    metadata = bpe_metadata()
    metadata["tokenizer.ggml.tokens"] += ["spare", "☪"]
    metadata["tokenizer.ggml.token_type"] += [TYPE_UNUSED, TYPE_NORMAL]
    tokenizer = Tokenizer(vocabulary_of(metadata))
    count = len(metadata["tokenizer.ggml.tokens"])
    assert tokenizer.piece(count - 2) == b""
    assert tokenizer.piece(count - 1) == "☪".encode()  # not in the byte alphabet: as it stands


@pytest.mark.parametrize("token", [-1, 1 << 40])
def test_what_is_no_token_is_refused(token):
    with pytest.raises(IndexError):
        TOKENIZER.piece(token)
    with pytest.raises(IndexError):
        TOKENIZER.decode([token])


def test_lone_surrogates_become_replacement_characters():
    assert TOKENIZER.decode(TOKENIZER.encode("a\ud800b\udc00")) == "a\ufffdb\ufffd"
    assert TOKENIZER.decode(TOKENIZER.encode("\ud83d\udc4d")) == "👍"  # a pair is a character


def test_ends():
    assert TOKENIZER.end_ids == {ID_OF["</s>"], END}


def parted(text, tokens):
    """At each place the longest token, the leftmost place first, by trying all."""
    parts, start, place = [], 0, 0
    while place < len(text):
        fits = [token for token in tokens if text.startswith(token, place)]
        if not fits:
            place += 1
            continue
        longest = max(fits, key=len)
        if text[start:place]:
            parts.append(text[start:place])
        parts.append(tokens[longest])
        start = place = place + len(longest)
    return parts + [text[start:]] * bool(text[start:])


TOKEN_SETS = st.dictionaries(
    st.text("<|]^-ab", min_size=1, max_size=4), st.integers(0, 99), max_size=8
)


@given(st.text("<|]^-ab", max_size=40), TOKEN_SETS)
def test_the_search_is_like_trying_everything(text, tokens):
    assert list(SpecialTokens(tokens.items()).partition(text)) == parted(text, tokens)


def test_blanks_behind_a_token_may_belong_to_it():
    special = SpecialTokens([("<a>", 1), ("<b>", 2)], strip_after=[1])
    assert list(special.partition("<a> \n x <b> y")) == [1, "x ", 2, " y"]
    assert list(special.partition("<a> \t")) == [1]
    assert list(special.partition("<a>  <b>")) == [1, 2]
