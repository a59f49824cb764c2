"""The fields by which a request says how its tokens are drawn, under llama-server's names.

Which are held within their limits and which refused beyond them is llama-server's list, but for
three: `repeat_last_n` and `dry_penalty_last_n` may also be -1 (all of the context), a
`repeat_penalty` must be positive, and tokens and samplers that do not exist are refused.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

from msgspec.structs import replace

from phaseloop.engine.settings import SAMPLER_LETTERS, SAMPLERS, Breaker, SamplerName, Sampling
from phaseloop.text.breakers import breakers
from phaseloop.text.tokenizer import Tokenizer

from .errors import invalid_field, not_supported
from .request_fields import Fields, choice, is_empty, real, shown, texts, whole, wrong

BREAKERS_DEFAULT = ("\n", ":", '"', "*")
BREAKERS_MAX = 64
BREAKERS_CHARACTERS_MAX = 1024
SAMPLERS_MAX = 64
PROBS_MAX = 1000  # alternatives per token: each goes through an outbox and over the wire
BIASES_MAX = 65_536
ID_DIGITS_MAX = 18  # more digits are a text, not a token's number
RANDOM_SEEDS = (-1, (1 << 32) - 1)  # the second is how the first looks in 32 bits
SEED_MAX = (1 << 64) - 1

LATER = ("adaptive_p", "infill")  # samplers of llama-server that are not built
LATER_LETTERS = {"a": "adaptive_p", "i": "infill"}


def _sampler_names() -> dict[str, SamplerName]:
    """Each name also as top-k and topk, and what else they are called."""
    names: dict[str, SamplerName] = {}
    for name in SAMPLERS:
        names |= {name: name, name.replace("_", "-"): name, name.replace("_", ""): name}
    names |= {"nucleus": "top_p", "temp": "temperature", "typ": "typ_p"}
    return names


SAMPLER_NAMES = _sampler_names()


def sampling_of(
    fields: Fields,
    defaults: Sampling,
    tokenizer: Tokenizer,
    breaker_texts: tuple[str, ...] = BREAKERS_DEFAULT,
) -> Sampling:
    """Raises ApiError.  May take a while: texts within become tokens."""
    refuse_what_comes_later(fields)
    base = fields.real("dry_base", default=defaults.dry_base)
    multiplier = fields.real("dry_multiplier", default=defaults.dry_multiplier)
    drawn = Sampling(
        samplers=samplers_of(fields, defaults.samplers),
        temperature=fields.held_real("temperature", default=defaults.temperature, low=0.0),
        dynatemp_range=fields.real("dynatemp_range", default=defaults.dynatemp_range),
        dynatemp_exponent=fields.real("dynatemp_exponent", default=defaults.dynatemp_exponent),
        top_k=fields.held("top_k", default=defaults.top_k, low=0),
        top_p=fields.held_real("top_p", default=defaults.top_p, low=0.0, high=1.0),
        min_p=fields.held_real("min_p", default=defaults.min_p, low=0.0, high=1.0),
        typical_p=fields.real("typical_p", default=defaults.typical_p),
        top_n_sigma=fields.real("top_n_sigma", default=defaults.top_n_sigma),
        xtc_probability=fields.held_real(
            "xtc_probability", default=defaults.xtc_probability, low=0.0, high=1.0
        ),
        xtc_threshold=fields.held_real(
            "xtc_threshold", default=defaults.xtc_threshold, low=0.0, high=1.0
        ),
        min_keep=fields.bounded("min_keep", default=defaults.min_keep, low=0),
        repeat_penalty=positive(fields, "repeat_penalty", defaults.repeat_penalty),
        repeat_last_n=fields.bounded("repeat_last_n", default=defaults.repeat_last_n, low=-1),
        presence_penalty=fields.real("presence_penalty", default=defaults.presence_penalty),
        frequency_penalty=fields.real("frequency_penalty", default=defaults.frequency_penalty),
        dry_multiplier=multiplier,
        dry_base=base if base >= 1.0 else defaults.dry_base,
        dry_allowed_length=fields.bounded(
            "dry_allowed_length", default=defaults.dry_allowed_length, low=0
        ),
        dry_penalty_last_n=fields.bounded(
            "dry_penalty_last_n", default=defaults.dry_penalty_last_n, low=-1
        ),
        logit_bias=defaults.logit_bias,
        post_sampling_probs=fields.flag("post_sampling_probs", defaults.post_sampling_probs),
    )
    strings = breaker_strings_of(fields, breaker_texts)
    if multiplier != 0.0:  # looking through the vocabulary is not for free
        drawn = replace(drawn, dry_breakers=breakers_of(tokenizer, strings))
    return replace(drawn, logit_bias=logit_bias_of(fields, drawn.logit_bias, tokenizer))


def refuse_what_comes_later(fields: Fields) -> None:
    fields.refuse("mirostat", is_harmless=is_empty)
    fields.refuse("adaptive_target", is_harmless=_is_negative)


def _is_negative(value: object) -> bool:
    return isinstance(value, int | float) and value < 0


def positive(fields: Fields, name: str, default: float) -> float:
    value = fields.real(name, default=default)
    if value <= 0:
        raise invalid_field(name, f"must be above 0, not {value:g}; 1 switches it off")
    return value


def seed_of(fields: Fields, default: int | None) -> int | None:
    """None: drawn for this request."""
    name, value = fields.found("seed")
    if value is None:
        return default
    seed = fields.bounded(name, default=-1, low=-1, high=SEED_MAX)
    return None if seed in RANDOM_SEEDS else seed


def samplers_of(fields: Fields, default: tuple[SamplerName, ...]) -> tuple[SamplerName, ...]:
    place, value = fields.found("samplers")
    if value is None:
        return default
    if isinstance(value, str):
        if len(value) > SAMPLERS_MAX:
            raise invalid_field(place, f"more than {SAMPLERS_MAX} letters")
        for letter in value:
            if letter in LATER_LETTERS:
                raise not_supported(f"{place}: {LATER_LETTERS[letter]} is not supported yet")
        return tuple(choice(place, letter, SAMPLER_LETTERS) for letter in value)
    names = texts(place, value, count_max=SAMPLERS_MAX, characters_max=1024)
    chosen: list[SamplerName] = []
    for index, name in enumerate(name.lower() for name in names):
        if name.replace("-", "_") in LATER:
            raise not_supported(f"{place}[{index}]: {name} is not supported yet")
        if name not in SAMPLER_NAMES:
            known = ", ".join(SAMPLERS)
            raise invalid_field(f"{place}[{index}]", f"{shown(name)} is unknown; known are {known}")
        chosen.append(SAMPLER_NAMES[name])
    return tuple(chosen)


def breaker_strings_of(fields: Fields, default: tuple[str, ...]) -> tuple[str, ...]:
    strings = fields.texts(
        "dry_sequence_breakers", count_max=BREAKERS_MAX, characters_max=BREAKERS_CHARACTERS_MAX
    )
    if strings is not None and not strings:
        raise invalid_field("dry_sequence_breakers", "must not be empty; leave it out instead")
    return default if strings is None else strings


def breakers_of(tokenizer: Tokenizer, strings: tuple[str, ...]) -> tuple[Breaker, ...]:
    return tuple(Breaker(head, tail) for head, tail in breakers(tokenizer, strings))


# --- logit bias -----------------------------------------------------------------------------------


def logit_bias_of(
    fields: Fields, default: tuple[tuple[int, float], ...], tokenizer: Tokenizer
) -> tuple[tuple[int, float], ...]:
    """By token, each once; a text means each of its tokens, `false` that they never come."""
    place, value = fields.found("logit_bias")
    sums: dict[int, float] = {}
    for token, bias in default if value is None else _biases(place, value, tokenizer):
        sums[token] = sums.get(token, 0.0) + bias
    if fields.flag("ignore_eos", False):
        sums |= dict.fromkeys(sorted(tokenizer.end_ids), -math.inf)
    return tuple(sums.items())


def _biases(place: str, value: object, tokenizer: Tokenizer) -> Iterable[tuple[int, float]]:
    if isinstance(value, dict):
        pairs = [
            (f"{place}.{shown(name)}", int(name) if is_id(name) else name, bias)
            for name, bias in cast(Mapping[str, Any], value).items()
        ]
    elif isinstance(value, list):
        pairs = [
            (f"{place}[{index}]", *_pair(f"{place}[{index}]", entry))
            for index, entry in enumerate(cast(list[object], value))
        ]
    else:
        raise wrong(place, "a list of [token, bias] or an object of biases by token", value)
    if len(pairs) > BIASES_MAX:
        raise invalid_field(place, f"{len(pairs)} entries, at most {BIASES_MAX} are allowed")
    for where, token, raw in pairs:
        bias = -math.inf if raw is False else real(where, raw)
        for one in _tokens(where, token, tokenizer):
            yield one, bias


def is_id(name: str) -> bool:
    return name.isdecimal() and len(name) <= ID_DIGITS_MAX


def _pair(place: str, entry: object) -> tuple[object, object]:
    pair = cast(list[object], entry) if isinstance(entry, list) else []
    if len(pair) != 2:
        raise wrong(place, "a pair of token and bias", cast(object, entry))
    return pair[0], pair[1]


def _tokens(place: str, token: object, tokenizer: Tokenizer) -> tuple[int, ...]:
    if isinstance(token, str):
        return tokenizer.encode(token)
    number = whole(place, token)
    count = len(tokenizer.vocabulary.tokens)
    if not 0 <= number < count:
        problem = f"{shown(number)} is no token of this model, which has {count}"
        raise invalid_field(place, problem)
    return (number,)
