"""The flags of `phaseloop serve` that say what holds where a request says nothing."""

import json
import math
from typing import cast

from .flags import MAYBE, SWITCH, Group, Kind, fraction, integer, one_of, text, used

CONTEXT_MAX = 1 << 26  # tokens


def biased(word: str) -> tuple[int, float]:
    """A token and what is added to its logit, as in 15043+1, 2-0.5, 7-inf."""
    for at, character in enumerate(word):
        if character in "+-" and at:
            token, bias = word[:at], word[at:]
            if token.isdecimal() and is_number(bias):
                return int(token), float(bias)
    raise ValueError("a token's number and a signed one are wanted, as in 15043-1")


def is_number(word: str) -> bool:
    try:
        return not math.isnan(float(word))
    except ValueError:
        return False


def json_object(word: str) -> dict[str, object]:
    try:
        value = json.loads(word)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return cast(dict[str, object], value)


BIAS = Kind("TOKEN+X", lambda word: (biased(word),))
ANSWERS = Group(
    "answers: what holds where a request says nothing",
    (
        used(
            "-n --predict --n-predict",
            integer(-1, CONTEXT_MAX),
            "predict",
            "tokens of an answer; -1: until it ends or the context is full",
            env="LLAMA_ARG_N_PREDICT",
        ),
        used("-s --seed", integer(-1, (1 << 64) - 1), "seed", "-1: a new one each time"),
        used(
            "--temp --temperature",
            fraction(-1e9, 1e9),
            "temperature",
            "0: always the likeliest token",
            env="LLAMA_ARG_TEMPERATURE",
        ),
        used("--top-k", integer(-1, 1 << 31), "top_k", "0: all", env="LLAMA_ARG_TOP_K"),
        used("--top-p", fraction(0, 1e9), "top_p", env="LLAMA_ARG_TOP_P"),
        used("--min-p", fraction(0, 1e9), "min_p", env="LLAMA_ARG_MIN_P"),
        used("--top-nsigma --top-n-sigma", fraction(-1e9, 1e9), "top_n_sigma"),
        used("--typical --typical-p", fraction(0, 1e9), "typical_p"),
        used("--xtc-probability", fraction(0, 1), "xtc_probability"),
        used("--xtc-threshold", fraction(0, 1), "xtc_threshold"),
        used("--dynatemp-range", fraction(0, 1e9), "dynatemp_range"),
        used("--dynatemp-exp", fraction(0, 1e9), "dynatemp_exponent"),
        used("--repeat-last-n", integer(-1, 1 << 31), "repeat_last_n"),
        used(
            "--repeat-penalty", fraction(0, 1e9), "repeat_penalty", env="LLAMA_ARG_REPEAT_PENALTY"
        ),
        used(
            "--presence-penalty",
            fraction(-1e9, 1e9),
            "presence_penalty",
            env="LLAMA_ARG_PRESENCE_PENALTY",
        ),
        used(
            "--frequency-penalty",
            fraction(-1e9, 1e9),
            "frequency_penalty",
            env="LLAMA_ARG_FREQUENCY_PENALTY",
        ),
        used("--dry-multiplier", fraction(0, 1e9), "dry_multiplier"),
        used("--dry-base", fraction(0, 1e9), "dry_base"),
        used("--dry-allowed-length", integer(0, 1 << 31), "dry_allowed_length"),
        used("--dry-penalty-last-n", integer(-1, 1 << 31), "dry_penalty_last_n"),
        used(
            "--dry-sequence-breaker",
            Kind("TEXT", lambda word: (word,)),
            "dry_sequence_breaker",
            "may be given several times; `none`: no breakers",
            collects=True,
        ),
        used("--samplers", text("A;B"), "samplers", "samplers in their order, separated by ;"),
        used("--sampler-seq --sampling-seq", text("LETTERS"), "sampler_seq", "the same"),
        used(
            "-l --logit-bias",
            BIAS,
            "logit_bias",
            "as in 15043-1; may be given several times",
            collects=True,
        ),
        used("--ignore-eos", SWITCH, "ignore_eos", "answers end only at their limit"),
        used(
            "--chat-template",
            text("NAME|JINJA"),
            "chat_template",
            "instead of the model's",
            env="LLAMA_ARG_CHAT_TEMPLATE",
        ),
        used(
            "--chat-template-file",
            text("FILE"),
            "chat_template_file",
            "instead of the model's",
            env="LLAMA_ARG_CHAT_TEMPLATE_FILE",
        ),
        used(
            "--chat-template-kwargs",
            Kind("JSON", json_object),
            "template_variables",
            "further variables of the template, an object",
            env="LLAMA_ARG_CHAT_TEMPLATE_KWARGS",
        ),
        used(
            "-rea --reasoning",
            MAYBE,
            "reasoning",
            "whether a template that can have the model think does so; auto: as it is made",
            env="LLAMA_ARG_REASONING",
        ),
        used(
            "--reasoning-format",
            one_of("auto", "deepseek", "none"),
            "reasoning_format",
            "auto, deepseek: thoughts are told apart from answers; none: they stay in the text",
            env="LLAMA_ARG_THINK",
        ),
        used(
            "--cache-prompt",
            SWITCH,
            "cache_prompt",
            "whether a prompt may begin with what a slot has computed before",
            env="LLAMA_ARG_CACHE_PROMPT",
            off="--no-cache-prompt",
        ),
        used(
            "--context-shift",
            SWITCH,
            "context_shift",
            "answers go on when the context is full, forgetting its older part",
            env="LLAMA_ARG_CONTEXT_SHIFT",
            off="--no-context-shift",
        ),
        used(
            "--prefill-assistant",
            SWITCH,
            "prefill_assistant",
            "an answer goes on with a last message that is the assistant's",
            env="LLAMA_ARG_PREFILL_ASSISTANT",
            off="--no-prefill-assistant",
        ),
    ),
)
