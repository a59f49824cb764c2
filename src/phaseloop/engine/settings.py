"""How a request wants its tokens drawn: the fields that llama-server's users send, by its names.

The defaults are llama-server's (build 11434).  Whoever makes these has checked the ranges.
"""

from array import array
from sys import byteorder
from typing import Literal, TypeAlias

from msgspec import Struct

Adapters: TypeAlias = tuple[tuple[int, float], ...]  # (id, scale), by id; without those of scale 0
SamplerName: TypeAlias = Literal[
    "penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"
]
SAMPLERS: tuple[SamplerName, ...] = (
    "penalties",
    "dry",
    "top_n_sigma",
    "top_k",
    "typ_p",
    "top_p",
    "min_p",
    "xtc",
    "temperature",
)
SAMPLER_LETTERS: dict[str, SamplerName] = {
    "e": "penalties",
    "d": "dry",
    "s": "top_n_sigma",
    "k": "top_k",
    "y": "typ_p",
    "p": "top_p",
    "m": "min_p",
    "x": "xtc",
    "t": "temperature",
}


class Breaker(Struct, frozen=True, gc=False, array_like=True):
    """A place that DRY does not look across: a token, and those that must follow it."""

    head: int
    tail: tuple[int, ...] = ()


class Sampling(Struct, frozen=True, gc=False, omit_defaults=True):
    """One request's sampler.  Samplers run in the order of `samplers`; the last step draws.

    `penalty_last_n` and `dry_penalty_last_n` are tokens; 0 switches the penalty off, -1 means all
    of the context.  A temperature of 0 or below is greedy: the likeliest token, of equals the one
    with the lowest id.
    """

    samplers: tuple[SamplerName, ...] = SAMPLERS
    temperature: float = 0.8
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    top_k: int = 40  # 0 or below: all
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    top_n_sigma: float = -1.0  # 0 or below: off
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    min_keep: int = 0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_breakers: tuple[Breaker, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, added); -inf forbids it
    n_probs: int = 0  # how many alternatives to report with each token; 0 reports nothing
    post_sampling_probs: bool = False  # report after the samplers instead of before them


Pooling: TypeAlias = Literal["none", "mean", "cls", "last", "rank"]
POOLINGS: tuple[Pooling, ...] = ("none", "mean", "cls", "last", "rank")


class Vectors(Struct, frozen=True, gc=False):
    """What an encode round gave a prompt: rows of `width` numbers, float32, little-endian."""

    width: int
    data: bytes

    @property
    def rows(self) -> list[list[float]]:
        values = array("f", self.data)
        if byteorder == "big":
            values.byteswap()
        starts = range(0, len(values), self.width)
        return [values[start : start + self.width].tolist() for start in starts]


GREEDY = Sampling(temperature=0.0)


class Speculation(Struct, frozen=True, gc=False, omit_defaults=True):
    """What a request says about drafts; None where it leaves that to the server."""

    n_max: int | None = None  # most drafts of a round; 0: none
    n_min: int | None = None  # fewer are not worth verifying
    p_min: float | None = None  # a model's drafts end before one it holds less likely


class Likelihood(Struct, frozen=True, gc=False, array_like=True):
    """How likely a token was that was drawn: natural logarithms of probabilities.

    `top` holds (token, log probability), the likeliest first.  Before the samplers: over the whole
    vocabulary at temperature 1, logit bias not counted, as llama-server has it.  After them
    (`post_sampling_probs`): among what they left over.
    """

    chosen: float
    top: tuple[tuple[int, float], ...] = ()
