"""Tiny models that can be served: every token is a letter, so texts and tokens are easy to tell."""

from pathlib import Path

from synthetic import VOCABULARY, ModelFile, decoder_file

LETTERS_MAX = 94


def letters_file(path: Path, kind: str = "Q8_0", *, first: int = 0x21, context: int = 512) -> Path:
    """`first` is the letter that token 0 stands for, by its code."""
    file = with_letters(decoder_file("llama", kind, seed=5), first)
    file.metadata["context_length"] = context
    return file.write(path)


def with_letters(file: ModelFile, first: int = 0x21) -> ModelFile:
    letters = [chr(code) for code in range(first, 0x7F)]
    unused = [f"<unused{index}>" for index in range(VOCABULARY - len(letters) - 1)]
    file.root |= {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.eos_token_id": LETTERS_MAX,
        "tokenizer.ggml.tokens": [*letters, "<|end|>", *unused],
        "tokenizer.ggml.token_type": [1] * len(letters) + [3] + [5] * len(unused),
        "tokenizer.ggml.merges": ["a b"],
    }
    return file
