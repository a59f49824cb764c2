"""Goal: on a real model phaseloop computes what llama.cpp computes, from the same text.

Method: prompts of 64 tokens and more, whose attention both compute in tiles.  The tokens' ids and
the log probabilities of the five likeliest next tokens are those that llama-server (build 11434)
gave for them, on one thread, with weights not repacked.  On the CPU where that was, weights as the
file has them lead to the same values within 0.0001.  Another CPU's order of sums, and repacked
weights, round activations elsewhere, which moves a logit of this model by about a tenth.
"""

import numpy as np
import pytest

pytest.importorskip("gguf")
pytest.importorskip("ggml")

from msgspec import Struct

from phaseloop.engine.cpu_load import CpuOptions, backend_over
from phaseloop.model.load import load_model
from phaseloop.model.weights import open_weights
from phaseloop.ops.interface import Span
from phaseloop.text.metadata import vocabulary_of
from phaseloop.text.tokenizer import Tokenizer

ROUNDING = 0.3


class Known(Struct, frozen=True):
    text: str
    length: int  # tokens
    ids_sum: int
    likeliest: tuple[tuple[int, float], ...]  # (token, log probability)


KNOWN = {
    "chat": Known(
        "<|im_start|>user\nA ship leaves the harbour at dawn with forty barrels of water. Every "
        "day the crew drinks three of them, and every fourth day it rains and one barrel is filled "
        "again. Explain, step by step, how one finds out on which day the last barrel is opened, "
        "and check the result.<|im_end|>\n<|im_start|>assistant\n",
        68,
        260_375,
        ((2068, -1.1261), (4239, -2.1854), (33, -2.3583), (504, -3.0291), (49, -3.2435)),
    ),
    "code": Known(
        'def merge(left, right):\n    """Merge two sorted lists into one sorted list."""\n'
        "    merged = []\n    i = j = 0\n    while i < len(left) and j < len(right):\n"
        "        if left[i] <= right[j]:\n            merged.append(left[i])\n"
        "            i += 1\n        else:\n            merged.append(right[j])\n"
        "            j += 1\n    merged",
        89,
        272_192,
        ((30, -0.0745), (4519, -2.7704), (446, -5.9864), (79, -6.0832), (75, -6.2384)),
    ),
    "German": Known(
        "Der Zug nach Hamburg fährt um halb sieben von Gleis neun ab. Wer ihn verpasst, muss zwei "
        "Stunden warten, denn der nächste hält nicht in Lüneburg. Am Bahnhof gibt es ein Café, in "
        "dem man frühstücken kann, und einen Laden, der Zeitungen und belegte Brötchen verkauft. "
        "Reservierungen sind",
        110,
        890_580,
        ((304, -2.0514), (281, -2.6537), (267, -2.6759), (28, -2.7317), (253, -2.915)),
    ),
}


class Smol:
    def __init__(self, path):
        self.weights = open_weights(path)
        self.model = load_model(self.weights)
        self.tokenizer = Tokenizer(vocabulary_of(self.weights.metadata))

    def log_probabilities(self, text, **options):
        options = CpuOptions(slot_count=1, context_length=256, **options)
        backend = backend_over(self.weights, self.model, options)
        ids = self.tokenizer.encode(text, add_special=True, parse_special=True)
        row = backend.forward([Span(0, 0, ids, 1, False)])[0].astype(np.float64)
        backend.close()
        return row - row.max() - np.log(np.exp(row - row.max()).sum())


@pytest.fixture(scope="module")
def smol(smollm2):
    return Smol(smollm2)


@pytest.mark.parametrize("name", KNOWN)
def test_the_text_has_the_same_tokens(smol, name):
    ids = smol.tokenizer.encode(KNOWN[name].text, add_special=True, parse_special=True)
    assert (len(ids), sum(ids)) == (KNOWN[name].length, KNOWN[name].ids_sum)


@pytest.mark.parametrize("repack", [False, True])
@pytest.mark.parametrize("attention", ["tiled", "fast"])
@pytest.mark.parametrize("name", KNOWN)
def test_the_next_token_is_as_likely(smol, name, attention, repack):
    found = smol.log_probabilities(KNOWN[name].text, attention=attention, repack=repack)
    assert int(found.argmax()) == KNOWN[name].likeliest[0][0]
    for token, expected in KNOWN[name].likeliest[:3]:
        assert found[token] == pytest.approx(expected, abs=ROUNDING)


def test_another_prompt_has_other_values(smol):
    """So that the tolerance of rounding could be missed."""
    found = smol.log_probabilities(KNOWN["German"].text)
    first, expected = KNOWN["code"].likeliest[0]
    assert abs(found[first] - expected) > ROUNDING
