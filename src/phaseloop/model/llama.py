"""Llama 2 and 3, Mistral, Mixtral, SmolLM and their kin: architecture `llama`.

The converter permutes queries and keys, so that positions turn adjacent pairs.
"""

from .decoder import decoder_model
from .shape import Model, read_rope, read_shape
from .weights import Weights


def llama(weights: Weights) -> Model:
    shape = read_shape(weights, "llama")
    rope = read_rope(weights, "llama", shape, "adjacent")
    return decoder_model(weights, "llama", shape, rope, biases=True)
