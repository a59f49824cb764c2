"""Sampling: microseconds per row of logits, in the engine's thread, over one round's rows.

The logits are made up, normal with a deviation of 3: flatter than a model's, so whatever has to
look for the likeliest tokens has more to do than it will have.
"""

import time

import numpy as np
from harness import Samples, figure

from phaseloop.engine.sampler import Draw
from phaseloop.engine.sampling import ChainSampler
from phaseloop.engine.settings import GREEDY, Sampling

SMALL, LARGE = 49_152, 151_936  # SmolLM2's vocabulary, Qwen2's and Qwen3's
SAMPLES = 200
HISTORY = 500  # tokens before the one that is drawn


def rounds(sampling: Sampling, rows: int, vocabulary: int) -> Samples:
    """Microseconds per row, of each of many rounds."""
    random = np.random.default_rng(rows)
    logits = (3 * random.standard_normal((rows, vocabulary))).astype(np.float32)
    tokens = random.integers(0, vocabulary, HISTORY).tolist()
    sampler, samples = ChainSampler(), list[float]()
    for position in range(SAMPLES // rows + 20):
        draws = [Draw(row, 0, row, position, tokens, sampling) for row in range(rows)]
        start_ns = time.perf_counter_ns()
        sampler.sample(logits, draws)
        samples.append((time.perf_counter_ns() - start_ns) / 1e3 / rows)
    return samples[5:]


def register(
    name: str, sampling: Sampling, rows: int, vocabulary: int, budget: float | None
) -> None:
    label = f"sampling: {name}, {rows} row{'s' * (rows > 1)} of {vocabulary:,}"

    @figure(label, unit="µs/row", at_most=budget)
    def measure() -> Samples:
        return rounds(sampling, rows, vocabulary)


for rows in (1, 8, 64):
    register("greedy", GREEDY, rows, SMALL, 50)
    register("default chain", Sampling(), rows, SMALL, 300)
    register("greedy", GREEDY, rows, LARGE, None)
    register("default chain", Sampling(), rows, LARGE, None)

everything = Sampling(repeat_penalty=1.1, dry_multiplier=0.8, xtc_probability=0.5, n_probs=10)
register("all samplers and 10 likelihoods", everything, 8, SMALL, None)
