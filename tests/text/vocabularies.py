"""Small vocabularies in the form of a GGUF file's keys, for tests that need a whole tokenizer."""

import json
from functools import cache
from typing import Any

from hypothesis import strategies as st
from tokenizers import Tokenizer as Reference
from tokenizers import models, pre_tokenizers, trainers

from phaseloop.text.metadata import vocabulary_of
from phaseloop.text.tokenizer import Tokenizer

Metadata = dict[str, Any]

CORPUS = (
    "The quick brown fox jumps over the lazy dog. It's what they'll say, isn't it? I'VE SEEN "
    "1234567 things, 89 of them twice.\n\n    def merge(left, right):\n        return left\n"
    "Größe, naïve café, Ärger und Übermut. Привет, мир! Καλημέρα. 你好,世界。今天天气很好。 "
    "नमस्ते दुनिया สวัสดีชาวโลก こんにちは カタカナ 한국어 👍👩‍👧 camelCase XMLHttpRequest snake_case "
    "https://example.org/a/b?c=d&e=f\r\n\tx  y   z ... !!! the the the then there these"
)
CONTROLS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|im|>")
TYPE_NORMAL, TYPE_UNKNOWN, TYPE_CONTROL, TYPE_USER, TYPE_UNUSED, TYPE_BYTE = range(1, 7)

# Scripts, blanks, marks and symbols that all Unicode versions in use agree about.
CHARACTERS = st.one_of(
    st.sampled_from(
        "aA'sStTlLdD 019\n\r\t.,!?/_-<>|é\u0301ß你世नमस\u094dかカ한👍\u200d\u3000\xa0\x00\x1f"
    ),
    st.characters(
        codec="utf-8", min_codepoint=0x20, max_codepoint=0x24F, exclude_characters="\u017f"
    ),
    st.characters(codec="utf-8", min_codepoint=0x391, max_codepoint=0x3A1),
    st.characters(codec="utf-8", min_codepoint=0x410, max_codepoint=0x44F),
    st.characters(codec="utf-8", min_codepoint=0x4E00, max_codepoint=0x4FFF),
    st.characters(codec="utf-8", min_codepoint=0xAC00, max_codepoint=0xACFF),
    st.characters(codec="utf-8", min_codepoint=0x1F600, max_codepoint=0x1F64F),
)
TEXTS = st.lists(st.one_of(CHARACTERS, st.sampled_from(CORPUS.split(" "))), max_size=30).map(
    "".join
)
ANY_TEXT = st.text(st.characters(codec="utf-8"), max_size=60)


@cache
def trained() -> tuple[list[str], list[str]]:
    """Tokens and merges of byte-level BPE, learnt from the corpus; tokens begin with all bytes."""
    reference = Reference(models.BPE())
    reference.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=520, initial_alphabet=alphabet, show_progress=False)
    reference.train_from_iterator([CORPUS] * 3, trainer)
    # The reference writes its state as JSON; the merges are nowhere else to be had.
    state = reference.to_str()
    merges = [" ".join(pair) for pair in json.loads(state)["model"]["merges"]]
    ids = reference.get_vocab()
    return sorted(ids, key=ids.__getitem__), merges


def bpe_metadata(**changes: Any) -> Metadata:
    tokens, merges = trained()
    types = [TYPE_NORMAL] * len(tokens) + [TYPE_CONTROL] * len(CONTROLS) + [TYPE_USER]
    metadata: Metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*tokens, *CONTROLS, "<tool>"],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(tokens),
        "tokenizer.ggml.eos_token_id": len(tokens) + 1,
    }
    return changed(metadata, changes)


def changed(metadata: Metadata, changes: dict[str, Any]) -> Metadata:
    """With keys set, named by what follows the last dot; None takes a key away."""
    for name, value in changes.items():
        key = f"tokenizer.ggml.{name}"
        metadata.pop(key, None)
        if value is not None:
            metadata[key] = value
    return metadata


def bpe_tokenizer(**changes: Any) -> Tokenizer:
    return Tokenizer(vocabulary_of(bpe_metadata(**changes)))
