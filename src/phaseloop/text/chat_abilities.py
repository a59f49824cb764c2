"""What a chat template makes use of, found out by trying small conversations on it.

Templates say nowhere what they support.  A part of a conversation that matters shows in the prompt,
so each trial puts a word somewhere and looks whether it comes out.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from msgspec import Struct
from msgspec.structs import asdict

from .budget import TemplateError

Variables: TypeAlias = Mapping[str, object]
Json: TypeAlias = dict[str, Any]

EFFORTS = ("low", "high", "max")
WORD = "zqword"
VALUE = "zqvalue"


class Abilities(Struct, frozen=True, gc=False):
    string_content: bool
    typed_content: bool  # content as a list of parts
    system_role: bool
    developer_role: bool
    tools: bool
    tool_calls: bool
    parallel_tool_calls: bool
    object_arguments: bool  # a call's arguments as a mapping instead of as a JSON text
    preserve_reasoning: bool  # keeps the reasoning of earlier answers where asked to
    reasoning_effort: bool

    def as_caps(self) -> dict[str, bool]:
        """As llama-server shows them in /props as `chat_template_caps`."""
        known = asdict(self)
        del known["developer_role"]
        return {f"supports_{name}": able for name, able in known.items()}


def abilities_of(source: str, render: Callable[[Variables], str]) -> Abilities:
    """`render` gives the prompt for the template's variables, or raises TemplateError."""

    def prompt(*messages: Json, tools: list[Json] | None = None, **more: object) -> str:
        try:
            return render({"messages": list(messages), "tools": tools, **more})
        except TemplateError:
            # Some are made for conversations with tools alone.
            return "" if tools else prompt(*messages, tools=[TOOL], **more)

    user = said("user", "hello")
    typed = prompt(said("user", [{"type": "text", "text": WORD}]))
    with_objects = prompt(*tool_talk({WORD: VALUE}), tools=[TOOL])
    with_texts = prompt(*tool_talk(f'{{"{WORD}": "{VALUE}"}}'), tools=[TOOL])
    # A template that only knows texts prints a mapping as Python does, or escapes its quotes twice.
    takes_objects = WORD in with_objects and f"{{'{WORD}'" not in with_objects
    takes_texts = WORD in with_texts
    two: list[object] = [{WORD: VALUE}, {"other": VALUE + "2"}]
    with_two = prompt(*tool_talk(*(two if takes_objects else map(json.dumps, two))), tools=[TOOL])
    return Abilities(
        string_content=WORD in prompt(said("user", WORD)),
        typed_content=WORD in typed and "'text'" not in typed and '"text"' not in typed,
        system_role=WORD in prompt(said("system", WORD), user),
        # Many print whatever role there is, though their models never saw this one.
        developer_role="developer" in source and WORD in prompt(said("developer", WORD), user),
        tools=TOOL["function"]["name"] in prompt(user, tools=[TOOL]),
        tool_calls=takes_objects or takes_texts,
        parallel_tool_calls=VALUE + "2" in with_two,
        object_arguments=takes_objects,
        preserve_reasoning=WORD in prompt(*THOUGHTFUL_TALK, **preserving_reasoning(True)),
        reasoning_effort=len({prompt(user, **with_effort(effort)) for effort in EFFORTS}) > 1,
    )


def said(role: str, content: object, **more: object) -> Json:
    return {"role": role, "content": content, **more}


def preserving_reasoning(enabled: bool) -> Json:
    """One wish, under each of the names by which templates know it."""
    names_of_opposite = ("clear_thinking", "truncate_history_thinking", "drop_thinking")
    return {"preserve_thinking": enabled, **dict.fromkeys(names_of_opposite, not enabled)}


def with_effort(effort: object) -> Json:
    return {"reasoning_effort": effort, "reasoning_strength": effort}


THOUGHTFUL_TALK = (
    said("user", "hello"),
    said("assistant", "hello", reasoning_content=WORD),
    said("user", "and"),
    said("assistant", "well", reasoning_content="hm"),
    said("user", "thanks"),
)
TOOL: Json = {
    "type": "function",
    "function": {
        "name": "zqtool",
        "description": "does it",
        "parameters": {
            "type": "object",
            "properties": {"argument": {"type": "string", "description": "what"}},
            "required": ["argument"],
        },
    },
}


def tool_talk(*arguments: object) -> list[Json]:
    """A conversation in which a tool was called, once for each of the arguments."""
    ids = [f"call{index:05}" for index in range(len(arguments))]  # some want nine characters
    calls = [
        {"id": call, "type": "function", "function": {"name": "tool", "arguments": argument}}
        for call, argument in zip(ids, arguments, strict=True)
    ]
    answers = [said("tool", "done", tool_call_id=call, name="tool") for call in ids]
    talk = [said("user", "hello"), said("assistant", "", tool_calls=calls), *answers]
    return [*talk, said("assistant", "it is done"), said("user", "thanks")]
