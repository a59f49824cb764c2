"""Angles of rotary position embeddings, as GGUF models define them."""

import math

import numpy as np
from numpy.typing import NDArray

from .interface import Rope

Doubles = NDArray[np.float64]


def angles(rope: Rope, factors: Doubles | None, positions: NDArray[np.int64]) -> Doubles:
    """By how much each pair of each row turns.  [rows, dimensions / 2], radians."""
    pair = np.arange(rope.dimensions // 2, dtype=np.float64)
    frequency = rope.base ** (-2.0 * pair / rope.dimensions)
    if factors is not None:
        frequency = frequency / factors
    scaled = rope.frequency_scale * frequency
    if rope.extrapolation:
        share = rope.extrapolation * extrapolated_share(rope, pair)
        scaled = scaled * (1 - share) + frequency * share
    return positions[:, None] * scaled


def extrapolated_share(rope: Rope, pair: Doubles) -> Doubles:
    """YaRN: fast pairs keep their frequency, slow ones are interpolated, with a ramp between."""
    low = max(0.0, math.floor(pair_that_turns(rope, rope.beta_fast)))
    high = min(rope.dimensions - 1.0, math.ceil(pair_that_turns(rope, rope.beta_slow)))
    return 1 - np.clip((pair - low) / max(0.001, high - low), 0.0, 1.0)


def pair_that_turns(rope: Rope, turns: float) -> float:
    """Which pair turns so often within the original context."""
    ratio = rope.context_original / (turns * 2 * math.pi)
    return rope.dimensions * math.log(ratio) / (2 * math.log(rope.base))


def magnitude(rope: Rope) -> float:
    """What turned dimensions are multiplied by."""
    if not rope.extrapolation:
        return rope.attention_factor
    return rope.attention_factor * (1 + 0.1 * math.log(1 / rope.frequency_scale))


def turn(x: Doubles, rope: Rope, angle: Doubles, factor: float) -> Doubles:
    """x [rows, heads, width] with each pair of the first `dimensions` turned and scaled."""
    half = rope.dimensions // 2
    if rope.pairs == "adjacent":
        first, second = slice(0, rope.dimensions, 2), slice(1, rope.dimensions, 2)
    else:
        first, second = slice(0, half), slice(half, rope.dimensions)
    cos, sin = np.cos(angle)[:, None, :] * factor, np.sin(angle)[:, None, :] * factor
    turned = x.copy()
    turned[..., first] = x[..., first] * cos - x[..., second] * sin
    turned[..., second] = x[..., first] * sin + x[..., second] * cos
    return turned
