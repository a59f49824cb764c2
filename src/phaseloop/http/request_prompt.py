"""A request's prompt: the forms in which clients send it, as tokens.

    "text"   [1, 2, 3]   [1, "text", 3]   {"prompt_string": "text"}     one prompt
    ["text", [1, 2], {"prompt_string": "text"}]                         several

As in llama-server, special tokens that are spelt out in a text are parsed, and what the model wants
in front of a text (BOS) is added to one, or to a mixed list that begins with one.
"""

from typing import Any, cast

from msgspec import Struct

from phaseloop.core.state import Limits
from phaseloop.text.tokenizer import Tokenizer

from .chat_reasoning import Start
from .errors import ApiError, invalid_field, not_supported
from .request_fields import shown, whole, wrong


class Prompt(Struct, frozen=True):
    tokens: tuple[int, ...]
    text: str | None = None  # as the client sent it, or as its messages were rendered
    shown: str = ""  # with its special tokens, where the answer repeats it
    thought: Start | None = None  # how the answer begins, where a thought is told apart from it
    said: str = ""  # what the answer begins with, since it continues it


def prompts_of(
    raw: object, tokenizer: Tokenizer, limits: Limits, place: str = "prompt"
) -> tuple[Prompt, ...]:
    """Takes time in proportion to the text: call it in a thread.  Raises ApiError."""
    if raw is None:
        raise invalid_field(place, "missing; it may be a string, a list of tokens, or several")
    several = cast(list[object], raw) if isinstance(raw, list) else None
    if several is None or any(isinstance(one, int) for one in several):
        return (prompt_of(place, cast(object, raw), tokenizer),)
    count_max = limits.queue_length_max + limits.slot_count
    if not several:
        raise invalid_field(place, "must not be an empty list")
    if len(several) > count_max:
        raise invalid_field(place, f"{len(several)} prompts, at most {count_max} can wait")
    return tuple(
        prompt_of(f"{place}[{index}]", one, tokenizer) for index, one in enumerate(several)
    )


def prompt_of(place: str, raw: object, tokenizer: Tokenizer) -> Prompt:
    if isinstance(raw, dict):
        made = cast(dict[str, Any], raw)
        if made.get("multimodal_data"):
            raise not_supported(f"{place}.multimodal_data: only text is supported")
        place, raw = f"{place}.prompt_string", made.get("prompt_string")
    if isinstance(raw, str):
        prompt = text_prompt(raw, tokenizer)
    elif isinstance(raw, list):
        prompt = Prompt(mixed(place, cast(list[object], raw), tokenizer))
    else:
        raise wrong(place, "a string, a list of tokens and strings, or an object", raw)
    if not prompt.tokens:
        raise invalid_field(place, "holds no token; at least one is needed to begin with")
    return prompt


def text_prompt(text: str, tokenizer: Tokenizer) -> Prompt:
    tokens = tokenizer.encode(text, add_special=True, parse_special=True)
    return Prompt(tokens, text)


def mixed(place: str, parts: list[object], tokenizer: Tokenizer) -> tuple[int, ...]:
    count = len(tokenizer.vocabulary.tokens)
    tokens: list[int] = []
    for index, part in enumerate(parts):
        if isinstance(part, str):
            tokens += tokenizer.encode(part, add_special=index == 0, parse_special=True)
            continue
        token = whole(f"{place}[{index}]", part)
        if not 0 <= token < count:
            problem = f"{shown(token)} is no token of this model, which has {count}"
            raise invalid_field(f"{place}[{index}]", problem)
        tokens.append(token)
    return tuple(tokens)


def check_fit(prompt: Prompt, limit: int | None, limits: Limits, trained: int) -> None:
    """Raises ApiError if prompt and first token do not fit the context.

    `trained`: the longest context of the model, 0 where nobody knows.
    """
    length, context = len(prompt.tokens), limits.context_length
    if length + (limit != 0) > context:
        raise exceeds_context(length, context, has_answer=limit != 0, trained=trained)


def exceeds_context(
    length: int, context: int, *, has_answer: bool = True, trained: int = 0
) -> ApiError:
    told = f"the prompt has {length} tokens, and the context holds {context}"
    if has_answer:
        told += " with the answer"
    remedy = "shorten it, or serve a larger context (--ctx-size)"
    if 0 < trained <= context:
        remedy = "shorten it: the model was trained for no more"
    extra = {"n_prompt_tokens": length, "n_ctx": context}
    return ApiError("exceed_context_size_error", f"{told}; {remedy}", extra=extra)
