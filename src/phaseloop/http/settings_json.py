"""How a sampler's settings are shown, under llama-server's names and in its order.

/props shows the server's own, /slots those of the request that has the slot, and an answer its own.
"""

from phaseloop.engine.settings import Adapters, Sampling

from .adapters import shown
from .request_fields import Json

SEED_RANDOM = (1 << 32) - 1  # what llama-server shows where each request draws its own

# Features of llama-server that are always off here, which its clients look for.
ALWAYS: Json = {
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
    "adaptive_target": -1.0,
    "adaptive_decay": 0.9,
    "n_discard": 0,
    "chat_format": "Content-only",
    "reasoning_in_content": False,
    "generation_prompt": "",
    "backend_sampling": False,
}


def settings_json(
    sampling: Sampling,
    *,
    seed: int | None,
    limit: int | None,
    drafters: str,
    adapters: Adapters,
) -> Json:
    """`seed` None: drawn for each request.  `limit` in tokens, None without one.

    `drafters` are the server's, as Description has them.
    """
    n_predict = -1 if limit is None else limit
    return {
        "seed": SEED_RANDOM if seed is None else seed,
        "temperature": sampling.temperature,
        "dynatemp_range": sampling.dynatemp_range,
        "dynatemp_exponent": sampling.dynatemp_exponent,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "top_n_sigma": sampling.top_n_sigma,
        "xtc_probability": sampling.xtc_probability,
        "xtc_threshold": sampling.xtc_threshold,
        "typical_p": sampling.typical_p,
        "repeat_last_n": sampling.repeat_last_n,
        "repeat_penalty": sampling.repeat_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "dry_multiplier": sampling.dry_multiplier,
        "dry_base": sampling.dry_base,
        "dry_allowed_length": sampling.dry_allowed_length,
        "dry_penalty_last_n": sampling.dry_penalty_last_n,
        "max_tokens": n_predict,
        "n_predict": n_predict,
        "n_probs": sampling.n_probs,
        "min_keep": sampling.min_keep,
        "samplers": sampling.samplers,
        "post_sampling_probs": sampling.post_sampling_probs,
        **ALWAYS,
        "speculative.types": drafters,
        "lora": shown(adapters),
    }
