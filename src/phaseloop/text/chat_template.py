"""Conversations to prompts, by the template that came with the model."""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from .budget import Budget, Limits
from .chat_abilities import abilities_of, preserving_reasoning, with_effort
from .chat_builtin import CHATML, template_source
from .chat_messages import Message, MessageError, ToolCall
from .sandbox import compile_template, run_template
from .vocabulary import Vocabulary

Json: TypeAlias = dict[str, Any]

USUAL_VARIABLES: Json = {"enable_thinking": True, "preserve_reasoning": True}  # as llama-server
OWN_VARIABLES = ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token")
REASONING, CONTENT = "zqreasoning", "zqcontent"  # found again in what a template makes of them
THINKING, THOUGHT = "<think>", "</think>"  # of templates that have models begin with it
SOME_DAY = datetime(2024, 7, 26, tzinfo=UTC)  # for trials, whose outcome does not depend on it


class Surroundings(Struct, frozen=True, gc=False):
    """What a template is told of the model, and what tokenising adds to every prompt anyway."""

    bos_token: str = ""
    eos_token: str = ""
    bos_is_added: bool = False
    eos_is_added: bool = False


NO_SURROUNDINGS = Surroundings()
USUAL_LIMITS = Limits()


def surroundings_of(vocabulary: Vocabulary) -> Surroundings:
    special = vocabulary.special
    return Surroundings(
        bos_token="" if special.bos is None else vocabulary.tokens[special.bos],
        eos_token="" if special.eos is None else vocabulary.tokens[special.eos],
        bos_is_added=vocabulary.add_bos,
        eos_is_added=vocabulary.add_eos,
    )


class ChatTemplate:
    """A compiled template.  Immutable, so threads may share it."""

    def __init__(
        self,
        source: str = CHATML,
        surroundings: Surroundings = NO_SURROUNDINGS,
        *,
        limits: Limits = USUAL_LIMITS,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Raises TemplateError for a template that cannot be compiled."""
        self.source = source
        self._surroundings = surroundings
        self._limits = limits
        self._clock_ns = clock_ns
        self._code = compile_template(source, Budget(limits, clock_ns))
        self.abilities = abilities_of(source, self._tried)

    def render(
        self,
        messages: Sequence[Message],
        *,
        now: datetime,
        tools: Sequence[Json] = (),
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The conversation as the model was trained to see it.

        `now` is what the template takes for the present.  With `continue_final` the last message
        is left open at its end (see is_continued).  `variables` are further ones of the request,
        such as enable_thinking.  The beginning and end tokens that tokenising adds are left off.
        Raises MessageError, and TemplateError, which says whether the template refused these
        messages.
        """
        shared = {
            "datetime": now.strftime("%b %d %Y"),
            "date_string": now.strftime("%d %b %Y"),
            **_chosen(variables or {}),
            "tools": list(tools) or None,
        }

        def run(messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
            own = {"messages": self._adapted(messages)}
            return self._run({**shared, **own, "add_generation_prompt": add_generation_prompt}, now)

        if continue_final:
            return _continued(messages, run)
        return run(messages, add_generation_prompt=add_generation_prompt)

    def _tried(self, variables: Mapping[str, object]) -> str:
        return self._run({"add_generation_prompt": True, **USUAL_VARIABLES, **variables}, SOME_DAY)

    def _run(self, variables: Mapping[str, object], now: datetime) -> str:
        around = self._surroundings
        tokens = {"bos_token": around.bos_token, "eos_token": around.eos_token}
        budget = Budget(self._limits, self._clock_ns)
        text = run_template(self._code, {**variables, **tokens}, budget, now)
        if around.bos_is_added:
            text = text.removeprefix(around.bos_token)
        if around.eos_is_added:
            text = text.removesuffix(around.eos_token)
        return text

    def _adapted(self, messages: Sequence[Message]) -> list[Json]:
        """Messages in the form that this template understands."""
        able = self.abilities
        numbered = list(enumerate(messages))
        if not able.developer_role:
            numbered = [
                (index, replace(message, role="system") if message.role == "developer" else message)
                for index, message in numbered
            ]
        if not able.system_role:
            numbered = list(_without_system(numbered))
        return [self._as_json(message, f"messages[{index}]") for index, message in numbered]

    def _as_json(self, message: Message, place: str) -> Json:
        able = self.abilities
        made: Json = {"role": message.role, "content": message.text}
        if able.typed_content and (len(message.parts) > 1 or not able.string_content):
            made["content"] = [{"type": "text", "text": text} for text in message.parts]
        if message.tool_calls:
            made["tool_calls"] = [
                _call_as_json(call, f"{place}.tool_calls[{index}]", as_object=able.object_arguments)
                for index, call in enumerate(message.tool_calls)
            ]
        optional = {
            "name": message.name,
            "reasoning_content": message.reasoning_content,
            "tool_call_id": message.tool_call_id,
        }
        return made | {key: value for key, value in optional.items() if value is not None}


def template_of(vocabulary: Vocabulary, chosen: str | None = None) -> ChatTemplate:
    """The template of --chat-template, a name or a source, if chosen; else the model's own.

    A model that brings none gets ChatML, as from llama-server.  Raises TemplateError.
    """
    own = vocabulary.chat_template or vocabulary.chat_template_tools or CHATML
    source = own if chosen is None else template_source(chosen)
    return ChatTemplate(source, surroundings_of(vocabulary))


def _chosen(variables: Mapping[str, object]) -> Json:
    """What a request sets, also under the other names by which templates know it."""
    for name in OWN_VARIABLES:
        if name in variables:
            raise MessageError(f"chat_template_kwargs.{name}", "cannot be set from outside")
    chosen = USUAL_VARIABLES | dict(variables)
    if isinstance(chosen["preserve_reasoning"], bool):
        chosen = preserving_reasoning(chosen["preserve_reasoning"]) | chosen
    if "reasoning_effort" in chosen:
        chosen = with_effort(chosen["reasoning_effort"]) | chosen
    return chosen


def _continued(messages: Sequence[Message], run: Callable[..., str]) -> str:
    """The conversation with its last message, the assistant's, left open.

    Where the template has a place for the reasoning that comes before an answer, it is filled, if
    only with nothing: the model shall go on answering, not begin to think.
    """
    *others, last = messages
    thought = last.reasoning_content or ""
    marked = Message("assistant", (CONTENT,), reasoning_content=REASONING)
    closed = run([*others, marked], add_generation_prompt=False)
    start, found, rest = closed.rpartition(REASONING)
    end, has_content, _ = rest.partition(CONTENT)
    if not found or not has_content:
        start, end = run(others, add_generation_prompt=True), ""
        if not start.rstrip().endswith(THINKING):
            return start + last.text
        start, end = start.rstrip(), THOUGHT
    is_thinking = bool(thought) and not last.text
    return start + thought + ("" if is_thinking else end + last.text)


def _without_system(messages: Iterable[tuple[int, Message]]) -> Iterable[tuple[int, Message]]:
    """Put what system messages say in front of what the user says next."""
    waiting: list[str] = []
    last = 0
    for index, message in messages:
        last = index
        if message.role == "system":
            waiting.append(message.text)
        elif message.role == "user" and waiting:
            yield index, replace(message, parts=("\n".join([*waiting, message.text]),))
            waiting = []
        else:
            yield index, message
    if waiting:
        yield last, Message("user", ("\n".join(waiting),))


def _call_as_json(call: ToolCall, place: str, *, as_object: bool) -> Json:
    arguments = call.function.arguments
    if as_object and isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise MessageError(f"{place}.function.arguments", f"is no JSON: {error}") from error
    elif not as_object and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    made: Json = {
        "type": call.type,
        "function": {"name": call.function.name, "arguments": arguments},
    }
    if call.id is not None:
        made["id"] = call.id
    return made
