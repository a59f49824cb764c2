"""Qwen 2 and 2.5 (queries, keys and values have biases), Qwen 3 (heads have norms), mixtures."""

from .decoder import decoder_model
from .shape import Model, read_rope, read_shape
from .weights import Weights


def qwen2(weights: Weights) -> Model:
    shape = read_shape(weights, "qwen2")
    rope = read_rope(weights, "qwen2", shape, "halves")
    return decoder_model(weights, "qwen2", shape, rope, biases=True)


def qwen3(weights: Weights) -> Model:
    shape = read_shape(weights, "qwen3")
    rope = read_rope(weights, "qwen3", shape, "halves")
    return decoder_model(weights, "qwen3", shape, rope, head_norms=True)


def qwen3moe(weights: Weights) -> Model:
    shape = read_shape(weights, "qwen3moe")
    if not shape.expert_count:
        raise weights.error("key qwen3moe.expert_count is 0; a mixture needs experts")
    rope = read_rope(weights, "qwen3moe", shape, "halves")
    return decoder_model(weights, "qwen3moe", shape, rope, head_norms=True)
