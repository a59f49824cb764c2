"""How likely tokens were, in llama-server's form: natural logarithms, or probabilities."""

import math
from collections.abc import Iterable

from phaseloop.text.tokenizer import Tokenizer

from .answer import Entry
from .request import Wanted
from .request_fields import FLOAT_MAX, Json


def probabilities(entries: Iterable[Entry], wanted: Wanted, tokenizer: Tokenizer) -> list[Json]:
    """One object per token, with the alternatives that were asked for, the likeliest first."""
    after = wanted.sampling.post_sampling_probs
    many = "top_probs" if after else "top_logprobs"
    shown = wanted.alternatives or 0
    made: list[Json] = []
    for token, likelihood in entries:
        one = likely(token, likelihood.chosen, tokenizer, after=after)
        tops = likelihood.top[:shown]
        if after:  # what the samplers ruled out is no alternative
            tops = [top for top in tops if top[1] > -math.inf]
        one[many] = [likely(other, log, tokenizer, after=after) for other, log in tops]
        made.append(one)
    return made


def likely(token: int, logprob: float, tokenizer: Tokenizer, *, after: bool) -> Json:
    piece = tokenizer.piece(token)
    return {
        "id": token,
        "token": piece.decode(errors="replace"),
        "bytes": list(piece),
        **({"prob": math.exp(logprob)} if after else {"logprob": finite(logprob)}),
    }


def finite(logprob: float) -> float:
    """JSON has no infinity; the lowest float of 32 bits stands for it."""
    return max(logprob, -FLOAT_MAX)


def legacy(content: list[Json], offset: int) -> Json:
    """The parallel lists by which OpenAI's older completions tell the same.

    `offset` is where in the text the first token begins, in characters.
    """
    offsets: list[int] = []
    for one in content:
        offsets.append(offset)
        offset += len(one["token"])
    return {
        "tokens": [one["token"] for one in content],
        "token_logprobs": [one["logprob"] for one in content],
        "top_logprobs": [
            {top["token"]: top["logprob"] for top in one["top_logprobs"]} for one in content
        ],
        "text_offset": offsets,
    }
