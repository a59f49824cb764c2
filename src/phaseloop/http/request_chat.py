"""A conversation as a prompt: the messages of a chat request, rendered by the model's template.

User text that spells out a control token becomes that token, as in llama-server: the template's
output is one text, which no longer says who wrote which part of it.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, cast

from msgspec import Struct

from phaseloop.text.budget import TemplateError
from phaseloop.text.chat_messages import MessageError, is_continued, parse_messages

from .errors import invalid, invalid_field, not_supported
from .request_fields import Fields, Json, wrong
from .served import Served


class Conversation(Struct, frozen=True):
    text: str  # the prompt
    said: str = ""  # of a message that is continued: the answer begins with it
    is_thinking: bool = False  # that message has begun to think, and not to answer


def rendered(fields: Fields, served: Served, now: datetime) -> str:
    return conversation_of(fields, served, now).text


def conversation_of(fields: Fields, served: Served, now: datetime) -> Conversation:
    """May take a while: call it in a thread.  Raises ApiError."""
    if served.template is None:
        problem = "this model has no chat template; --chat-template gives it one"
        raise not_supported(f"messages: {problem}, or use /completion")
    if fields.raw.get("messages") is None:
        raise invalid_field("messages", "missing; an answer needs at least one")
    try:
        messages = parse_messages(fields.raw["messages"])
        add = _maybe(fields, "add_generation_prompt")
        asked = _maybe(fields, "continue_final_message")
        continues = is_continued(
            messages,
            continue_final_message=asked,
            add_generation_prompt=add,
            prefill=served.prefills,
        )
        text = served.template.render(
            messages,
            now=now,
            tools=tools_of(fields),
            add_generation_prompt=add is not False,
            continue_final=continues,
            variables=variables_of(fields, served.template_variables),
        )
    except (MessageError, TemplateError) as error:
        raise invalid(str(error)) from error
    if not continues:
        return Conversation(text)
    last = messages[-1]
    # Who asks for it by name knows what is there; an answer to others is whole.
    said = last.text if not asked or fields.flag("echo", False) else ""
    return Conversation(text, said, bool(last.reasoning_content) and not last.text)


def _maybe(fields: Fields, name: str) -> bool | None:
    return None if fields.found(name)[1] is None else fields.flag(name, False)


def tools_of(fields: Fields) -> Sequence[Json]:
    """For the template; that the model's calls of them are understood is not built yet."""
    place, value = fields.found("tools")
    if value is None:
        return ()
    if not isinstance(value, list):
        raise wrong(place, "a list of objects", value)
    for index, tool in enumerate(cast(list[object], value)):
        if not isinstance(tool, dict):
            raise wrong(f"{place}[{index}]", "an object", tool)
    return cast(list[Json], value)


def variables_of(fields: Fields, defaults: Mapping[str, object]) -> dict[str, Any]:
    """What a request tells the template beside the messages."""
    variables = {**defaults, **fields.nested("chat_template_kwargs").raw}
    thinking = variables.get("enable_thinking")
    if thinking is not None and not isinstance(thinking, bool):
        raise wrong("chat_template_kwargs.enable_thinking", "true or false", thinking)
    effort = fields.text("reasoning_effort", "")
    if effort == "none":
        variables["enable_thinking"] = False
    elif effort:
        variables["reasoning_effort"] = effort
    return variables
