"""`generation_settings`: what a request came to, once defaults and limits were applied."""

import math

from .request import Wanted
from .request_fields import Json
from .settings_json import settings_json


def settings_of(wanted: Wanted, seed: int, drafters: str) -> Json:
    """Under llama-server's names.

    `seed` is the one that was used, so that asking again with it gives the same answer.
    """
    return {
        **settings_json(
            wanted.sampling,
            seed=seed,
            limit=wanted.limit,
            drafters=drafters,
            adapters=wanted.adapters,
        ),
        "dry_sequence_breakers": wanted.breaker_texts,
        "stop": wanted.stop_texts,
        "n_keep": wanted.keep,
        "ignore_eos": wanted.ignore_eos,
        "stream": wanted.stream,
        "logit_bias": [
            {"bias": bias if math.isfinite(bias) else None, "token": token}
            for token, bias in wanted.sampling.logit_bias
        ],
        "n_probs": wanted.alternatives or 0,
        "grammar": "",
        "grammar_lazy": False,
        "grammar_triggers": [],
        "preserved_tokens": [],
        "reasoning_format": wanted.reasoning_format,
        "timings_per_token": wanted.timings_per_token,
    }
