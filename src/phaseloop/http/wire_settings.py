"""`generation_settings`: what a request came to, once defaults and limits were applied."""

import math

from .request import Wanted
from .request_fields import Json
from .settings_json import settings_json


def settings_of(wanted: Wanted, seed: int) -> Json:
    """Under llama-server's names, those of features that are always off here among them.

    `seed` is the one that was used, so that asking again with it gives the same answer.
    """
    return {
        **settings_json(wanted.sampling, seed=seed, limit=wanted.limit),
        "dry_sequence_breakers": wanted.breaker_texts,
        "mirostat": 0,
        "mirostat_tau": 5.0,
        "mirostat_eta": 0.1,
        "adaptive_target": -1.0,
        "adaptive_decay": 0.9,
        "stop": wanted.stop_texts,
        "n_keep": wanted.keep,
        "n_discard": 0,
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
        "chat_format": "Content-only",
        "reasoning_format": wanted.reasoning_format,
        "reasoning_in_content": False,
        "generation_prompt": "",
        "speculative.types": "none",
        "timings_per_token": wanted.timings_per_token,
        "backend_sampling": False,
        "lora": [],
    }
