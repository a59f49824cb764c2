"""The messages of a conversation, as clients send them: checked, and in one form."""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Struct, UnsetType

Role: TypeAlias = Literal["system", "developer", "user", "assistant", "tool"]


class MessageError(ValueError):
    """Messages that cannot be answered: which parameter is at fault, and why."""

    def __init__(self, parameter: str, problem: str) -> None:
        super().__init__(f"{parameter}: {problem}")
        self.parameter = parameter


class Function(Struct, frozen=True, gc=False):
    """A call of a client's tool."""

    name: str
    arguments: str | dict[str, Any] = "{}"  # JSON, as a text or already as a mapping


class ToolCall(Struct, frozen=True, gc=False):
    function: Function
    id: str | None = None
    type: Literal["function"] = "function"


class Message(Struct, frozen=True, gc=False):
    """One message; its text parts are kept apart, since some templates want them so."""

    role: Role
    parts: tuple[str, ...] = ()
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        """The parts on lines of their own; as in llama-server, empty ones in front leave none."""
        first = next((index for index, part in enumerate(self.parts) if part), len(self.parts))
        return "\n".join(self.parts[first:])


class _Part(Struct, frozen=True, gc=False):
    type: str
    text: str | None = None


class _Sent(Struct, frozen=True, gc=False):
    """A message as it is on the wire.  What is not listed is not used."""

    role: Role
    content: str | list[_Part] | UnsetType | None = UNSET
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


def parse_messages(raw: object) -> tuple[Message, ...]:
    """Check what a client sent as `messages`, decoded from JSON.  Raises MessageError."""
    try:
        sent = msgspec.convert(raw, list[_Sent])
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$")
        raise MessageError(f"messages{path.rstrip('`')}", problem) from error
    if not sent:
        raise MessageError("messages", "there is none, and an answer needs one")
    return tuple(_message(message, f"messages[{index}]") for index, message in enumerate(sent))


def is_continued(
    messages: Sequence[Message],
    *,
    continue_final_message: bool | None = None,
    add_generation_prompt: bool | None = None,
    prefill: bool = True,
) -> bool:
    """Whether the answer goes on with the last message instead of following it.

    The first two are the request's fields, None where it has none; `prefill` is the server's
    setting, by which a message of the assistant at the end is continued unasked.  Raises
    MessageError for a last message that cannot be continued, and for a contradiction.
    """
    *others, last = messages
    if continue_final_message and add_generation_prompt:
        problem = "cannot be true together with add_generation_prompt"
        raise MessageError("continue_final_message", problem)
    by_itself = prefill and continue_final_message is None and last.role == "assistant"
    if not continue_final_message and not by_itself:
        return False
    place = f"messages[{len(others)}]"
    if last.role != "assistant":
        problem = f"the final message is the {last.role}'s, and only the assistant's is continued"
        raise MessageError("continue_final_message", problem)
    if others and others[-1].role == "assistant":
        raise MessageError(place, "only one message of the assistant may stand at the end")
    if last.tool_calls:
        raise MessageError(f"{place}.tool_calls", "a call of a tool cannot be continued")
    return True


def _message(sent: _Sent, place: str) -> Message:
    if sent.content is UNSET and not (sent.role == "assistant" and sent.tool_calls):
        problem = "missing; it may be null, a string or a list of text parts"
        raise MessageError(f"{place}.content", problem)
    if sent.tool_calls and sent.role != "assistant":
        raise MessageError(
            f"{place}.tool_calls", f"a message of role {sent.role} cannot call tools"
        )
    return Message(
        role=sent.role,
        parts=_parts(sent.content, f"{place}.content"),
        name=sent.name,
        reasoning_content=sent.reasoning_content,
        tool_calls=tuple(sent.tool_calls or ()),
        tool_call_id=sent.tool_call_id,
    )


def _parts(content: str | list[_Part] | UnsetType | None, place: str) -> tuple[str, ...]:
    if content is None or content is UNSET:
        return ()
    if isinstance(content, str):
        return (content,)
    texts: list[str] = []
    for index, part in enumerate(content):
        if part.type != "text":
            problem = f"{part.type[:40]!r} is not supported, only 'text'"
            raise MessageError(f"{place}[{index}].type", problem)
        if part.text is None:
            raise MessageError(f"{place}[{index}].text", "missing")
        texts.append(part.text)
    return tuple(texts)
