"""The sampler: from logits to tokens, as each request wants them.

Every row is sampled by itself, from its logits, its settings and its place in its request: a token
and its likelihood have the same bits in any company.  What the steps of a chain do is in
sampling_steps.py and sampling_dry.py; the order in which they do it, and the draw, are here.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from .sampler import Draw, Sampled
from .sampling_candidates import Candidates, Floats, leading
from .sampling_dry import BreakerTables, dry, dry_applies
from .sampling_random import uniform
from .sampling_steps import (
    bias,
    min_p,
    penalties,
    penalties_apply,
    temperature,
    top_k,
    top_n_sigma,
    top_p,
    typical,
    xtc,
    xtc_applies,
)
from .settings import Likelihood, Sampling

FINAL_DRAW = 0  # XTC's coins have the numbers from 1 on, by their place in the chain


class ChainSampler:
    """Implements sampler.Sampler.  Keeps nothing of a request; for one thread at a time."""

    def __init__(self) -> None:
        self._tables = BreakerTables()

    def sample(self, logits: NDArray[np.float32], draws: Sequence[Draw]) -> list[Sampled]:
        likeliest = logits.argmax(axis=1)
        with np.errstate(over="ignore", divide="ignore"):  # absurd settings; CEILING contains them
            return [
                self._sample(row, int(token), draw)
                for row, token, draw in zip(logits, likeliest, draws, strict=True)
            ]

    def _sample(self, row: NDArray[np.float32], likeliest: int, draw: Draw) -> Sampled:
        if not np.isfinite(row[likeliest]):  # argmax finds a NaN before anything else
            return Sampled(None)
        sampling = draw.sampling
        if takes_likeliest(sampling):
            if sampling.n_probs <= 0:
                return Sampled(likeliest)
            if sampling.post_sampling_probs:
                return Sampled(likeliest, Likelihood(0.0, ((likeliest, 0.0),)))
            return Sampled(likeliest, before(row, likeliest, sampling.n_probs))
        candidates = Candidates(row)
        self._narrow(candidates, draw)
        if not len(candidates):
            return Sampled(None)
        place = drawn(candidates, draw)
        token = int(candidates.ids[place])
        if sampling.n_probs <= 0:
            return Sampled(token)
        if sampling.post_sampling_probs:
            return Sampled(token, after(candidates, place, sampling.n_probs))
        return Sampled(token, before(row, token, sampling.n_probs))

    def _narrow(self, candidates: Candidates, draw: Draw) -> None:
        """Run the chain."""
        sampling = draw.sampling
        if sampling.logit_bias:
            bias(candidates, sampling)
        for number, name in enumerate(sampling.samplers, start=1):
            if not len(candidates):
                return
            match name:
                case "penalties":
                    penalties(candidates, sampling, draw.tokens)
                case "dry":
                    dry(candidates, sampling, draw.tokens, self._tables)
                case "top_n_sigma":
                    top_n_sigma(candidates, sampling)
                case "top_k":
                    top_k(candidates, sampling)
                case "typ_p":
                    typical(candidates, sampling)
                case "top_p":
                    top_p(candidates, sampling)
                case "min_p":
                    min_p(candidates, sampling)
                case "xtc":
                    xtc(candidates, sampling, partial(random_number, draw, number))
                case "temperature":
                    temperature(candidates, sampling)


def takes_likeliest(sampling: Sampling) -> bool:
    """Whether a chain can only yield the likeliest token of the row as it is.

    So it is if the temperature says so, and nothing before it can dethrone that token.
    """
    if sampling.logit_bias:
        return False
    for name in sampling.samplers:
        match name:
            case "temperature":
                return sampling.temperature <= 0.0 and sampling.dynatemp_range <= 0.0
            case "penalties":
                dethrones = penalties_apply(sampling)
            case "dry":
                dethrones = dry_applies(sampling)
            case "xtc":
                dethrones = xtc_applies(sampling)
            case "typ_p":
                dethrones = sampling.typical_p < 1.0
            case "top_n_sigma" | "top_k" | "top_p" | "min_p":
                dethrones = False
        if dethrones:
            return False
    return False


def drawn(candidates: Candidates, draw: Draw) -> int:
    """Where the drawn token is among the candidates.

    The probabilities, from the highest down, equals by id, part the interval from 0 to 1; a random
    number falls into one of the parts.
    """
    if len(candidates) == 1:
        return 0
    return int(candidates.likeliest(random_number(draw, FINAL_DRAW))[-1])


def random_number(draw: Draw, number: int) -> float:
    return uniform(draw.seed, draw.choice, draw.position, number)


def before(row: NDArray[np.float32], token: int, count: int) -> Likelihood:
    """Of the model's own distribution, which no sampler has touched.

    As llama-server has it (get_token_probabilities): softmax of the logits over the vocabulary.
    Tokens without any probability are not listed.
    """
    logits = row.astype(np.float64)
    top = logits.max()
    logs: Floats = logits - (top + np.log(np.exp(logits - top).sum()))
    listed = [place for place in leading(row, count).tolist() if logs[place] > -np.inf]
    return Likelihood(float(logs[token]), tuple((place, float(logs[place])) for place in listed))


def after(candidates: Candidates, place: int, count: int) -> Likelihood:
    """Among the candidates that the samplers left over."""
    logs, probabilities = candidates.log_probabilities()
    listed = [one for one in candidates.best(count).tolist() if probabilities[one] > 0.0]
    top = tuple((int(candidates.ids[one]), float(logs[one])) for one in listed)
    return Likelihood(float(logs[place]), top)
