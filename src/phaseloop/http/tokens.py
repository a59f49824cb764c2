"""Text to tokens and back, and conversations to prompts: what clients count and check with."""

from datetime import datetime
from typing import cast

from starlette.requests import Request
from starlette.responses import Response

from phaseloop.text.tokenizer import Tokenizer

from .body import fields_of
from .errors import invalid_field, json_response
from .request_chat import rendered
from .request_fields import Fields, shown, whole, wrong
from .request_prompt import text_prompt
from .served import Served, served_of
from .table import post


async def tokenize(request: Request) -> Response:
    fields, served = await fields_of(request), served_of(request)
    return json_response(await served.in_thread(tokenized, fields, served.tokenizer))


def tokenized(fields: Fields, tokenizer: Tokenizer) -> dict[str, object]:
    """`content` is a text, or a list of texts and tokens; without it there are no tokens."""
    place, content = fields.found("content")
    add_special = fields.flag("add_special", False)
    parse_special = fields.flag("parse_special", True)
    if isinstance(content, str) or content is None:
        parts: list[object] = [content or ""]
    elif isinstance(content, list):
        parts = cast(list[object], content)
    else:
        raise wrong(place, "a string, or a list of strings and tokens", content)
    tokens: list[int] = []
    for index, part in enumerate(parts):
        if isinstance(part, str):
            first = add_special and index == 0 and content is not None
            tokens += tokenizer.encode(part, add_special=first, parse_special=parse_special)
        else:
            tokens.append(known(f"{place}[{index}]", part, tokenizer))
    if not fields.flag("with_pieces", False):
        return {"tokens": tokens}
    return {"tokens": [{"id": token, "piece": piece_of(token, tokenizer)} for token in tokens]}


def known(place: str, value: object, tokenizer: Tokenizer) -> int:
    """Raises ApiError for what is no token of the model."""
    token, count = whole(place, value), len(tokenizer.vocabulary.tokens)
    if not 0 <= token < count:
        problem = f"{shown(token)} is no token of this model, which has {count}"
        raise invalid_field(place, problem)
    return token


def piece_of(token: int, tokenizer: Tokenizer) -> str | list[int]:
    """A token may be part of a character: then its bytes."""
    piece = tokenizer.piece(token)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


async def detokenize(request: Request) -> Response:
    fields, served = await fields_of(request), served_of(request)
    return json_response(await served.in_thread(detokenized, fields, served.tokenizer))


def detokenized(fields: Fields, tokenizer: Tokenizer) -> dict[str, object]:
    place, value = fields.found("tokens")
    if value is None:
        return {"content": ""}
    if not isinstance(value, list):
        raise wrong(place, "a list of tokens", value)
    listed = enumerate(cast(list[object], value))
    tokens = [known(f"{place}[{index}]", token, tokenizer) for index, token in listed]
    return {"content": tokenizer.decode(tokens)}


async def apply_template(request: Request) -> Response:
    """The prompt that a chat request with this body would be answered to."""
    fields, served = await fields_of(request), served_of(request)
    now = datetime.now().astimezone()
    return json_response({"prompt": await served.in_thread(rendered, fields, served, now)})


async def input_tokens(request: Request) -> Response:
    """How many tokens the prompt of a chat request has."""
    fields, served = await fields_of(request), served_of(request)
    now = datetime.now().astimezone()
    count = await served.in_thread(counted, fields, served, now)
    return json_response({"object": "response.input_tokens", "input_tokens": count})


def counted(fields: Fields, served: Served, now: datetime) -> int:
    return len(text_prompt(rendered(fields, served, now), served.tokenizer).tokens)


ROWS = (
    post(tokenize, "/tokenize"),
    post(detokenize, "/detokenize"),
    post(apply_template, "/apply-template"),
    post(input_tokens, "/v1/chat/completions/input_tokens", "/chat/completions/input_tokens"),
)
