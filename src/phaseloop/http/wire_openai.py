"""The answers of /v1/completions and /v1/chat/completions, in OpenAI's shapes."""

from collections.abc import Sequence
from typing import Literal

from .answer import Answer
from .answer_reply import Part, Reply, Whole
from .chat_reasoning import Reasoning
from .request_fields import Json
from .wire import prompt_progress
from .wire_logprobs import legacy, probabilities
from .wire_native import STREAMED, Native


class OpenAi:
    """What both shapes share; each says what a choice looks like."""

    ends_with_done = True

    def __init__(self, reply: Reply, whole_name: str, chunk_name: str) -> None:
        self._reply = reply
        self._whole_name = whole_name
        self._chunk_name = chunk_name
        self._native = Native(reply)  # for `__verbose`

    def _event(self, *choices: Json) -> Json:
        return self._object(self._chunk_name, choices)

    def _object(self, name: str, choices: Sequence[Json]) -> Json:
        reply = self._reply
        return {
            "choices": choices,
            "created": reply.created,
            "id": reply.id,
            "model": reply.model,
            "system_fingerprint": reply.build,
            "object": name,
        }

    def _timed(self, part: Part, answer: Answer, event: Json) -> Json:
        if self._reply.wanted.timings_per_token:
            event["timings"] = part.work((answer,)).as_timings()
        return event

    def _closed(self, event: Json, *, with_usage: bool) -> Sequence[Json]:
        """The last events of a call, from the last choice's."""
        reply = self._reply
        if not reply.wanted.include_usage:
            extra: Json = {"usage": reply.usage()} if with_usage else {}
            return (event | extra | reply.closing(),)
        return (event, self._event() | {"usage": reply.usage()} | reply.closing())

    def _verbose(self, part: Part, answer: Answer, whole: Whole) -> Json:
        if not self._reply.wanted.verbose:
            return {}
        return {"__verbose": self._native.final(part, answer, whole)}

    def _logprobs(self, entries_of: Answer | Whole) -> list[Json] | None:
        reply = self._reply
        if reply.wanted.alternatives is None:
            return None
        is_whole = isinstance(entries_of, Whole)
        entries = entries_of.entries if is_whole else entries_of.take_entries()
        return probabilities(entries, reply.wanted, reply.served.tokenizer)


class Completion(OpenAi):
    def __init__(self, reply: Reply) -> None:
        super().__init__(reply, "text_completion", "text_completion")
        self._lengths = [0] * reply.open_choices  # characters of each choice that went out
        self._to_echo = set(range(reply.open_choices)) if reply.wanted.echo else set[int]()

    def progress(self, part: Part, *, is_first: bool) -> Json:
        event = self._event(self._choice(part.answers[0], "", None))
        return event | prompt_progress(self._reply, part, is_first=is_first)

    def chunks(self, part: Part, answer: Answer, text: str, ids: Sequence[int]) -> Sequence[Json]:
        text = self._echo(part, answer) + text
        if not text:
            return ()
        logprobs = self._logprobs(answer)
        event = self._event(self._choice(answer, text, logprobs))
        self._lengths[answer.index] += len(text)
        return (self._timed(part, answer, event),)

    def finals(self, part: Part, answer: Answer, *, is_last: bool) -> Sequence[Json]:
        text = self._echo(part, answer)
        choice = self._choice(answer, text, self._logprobs(answer) or None)
        event = self._event(choice | {"finish_reason": finish_reason(answer)})
        event |= self._verbose(part, answer, STREAMED)
        return self._closed(event, with_usage=True) if is_last else (event,)

    def body(self, wholes: Sequence[tuple[Part, Answer, Whole]]) -> Json:
        choices: list[Json] = []
        for part, answer, whole in wholes:
            echo = self._echo(part, answer)
            self._lengths[answer.index] = len(echo)
            choice = self._choice(answer, echo + whole.text, self._logprobs(whole))
            choices.append(choice | {"finish_reason": finish_reason(answer)})
        made = self._object(self._whole_name, choices) | {"usage": self._reply.usage()}
        return made | self._verbose(*wholes[0]) | self._reply.closing()

    def _choice(self, answer: Answer, text: str, logprobs: list[Json] | None) -> Json:
        made: Json | None = None
        if logprobs is not None:
            made = {"content": logprobs}
            if not self._reply.wanted.sampling.post_sampling_probs:
                made |= legacy(logprobs, self._lengths[answer.index])
        return {"text": text, "index": answer.index, "logprobs": made, "finish_reason": None}

    def _echo(self, part: Part, answer: Answer) -> str:
        if answer.index not in self._to_echo:
            return ""
        self._to_echo.remove(answer.index)
        return part.prompt.shown


class Chat(OpenAi):
    def __init__(self, reply: Reply) -> None:
        super().__init__(reply, "chat.completion", "chat.completion.chunk")
        self._opened: set[int] = set()  # choices whose role has been told
        self._reasoning = {
            answer.index: Reasoning(part.prompt.thought)
            for part in reply.parts
            for answer in part.answers
            if part.prompt.thought is not None
        }
        self._to_say = {
            answer.index: part.prompt.said
            for part in reply.parts
            for answer in part.answers
            if part.prompt.said
        }

    def progress(self, part: Part, *, is_first: bool) -> Json:
        answer = part.answers[0]
        delta: Json = {}
        if answer.index not in self._opened:
            self._opened.add(answer.index)
            delta = {"role": "assistant", "content": None}
        event = self._event(self._choice(answer, delta))
        return event | prompt_progress(self._reply, part, is_first=is_first)

    def chunks(self, part: Part, answer: Answer, text: str, ids: Sequence[int]) -> Sequence[Json]:
        opening = self._opening(answer)
        reasoning = self._reasoning.get(answer.index)
        thought, content = ("", text) if reasoning is None else reasoning.push(text)
        return (*opening, *self._delta(part, answer, thought, content))

    def finals(self, part: Part, answer: Answer, *, is_last: bool) -> Sequence[Json]:
        opening = self._opening(answer)
        reasoning = self._reasoning.get(answer.index)
        thought, content = ("", "") if reasoning is None else reasoning.finish()
        content = self._to_say.pop(answer.index, "") + content
        held = self._delta(part, answer, thought, content)
        choice = self._choice(answer, {}) | {"finish_reason": finish_reason(answer)}
        logprobs = self._logprobs(answer)
        if logprobs:
            choice["logprobs"] = {"content": logprobs}
        event = self._event(choice) | self._verbose(part, answer, STREAMED)
        last = self._closed(event, with_usage=False) if is_last else (event,)
        return (*opening, *held, *last)

    def body(self, wholes: Sequence[tuple[Part, Answer, Whole]]) -> Json:
        choices: list[Json] = []
        for _, answer, whole in wholes:
            choice: Json = {
                "finish_reason": finish_reason(answer),
                "index": answer.index,
                "message": self._message(answer, whole.text),
            }
            logprobs = self._logprobs(whole)
            if logprobs is not None:
                choice["logprobs"] = {"content": logprobs}
            choices.append(choice)
        made = self._object(self._whole_name, choices) | {"usage": self._reply.usage()}
        return made | self._verbose(*wholes[0]) | self._reply.closing()

    def _message(self, answer: Answer, text: str) -> Json:
        said = self._to_say.pop(answer.index, "")
        reasoning = self._reasoning.get(answer.index)
        if reasoning is None:
            return {"role": "assistant", "content": said + text}
        thought, content = reasoning.push(text)
        more_thought, more_content = reasoning.finish()
        message = {"role": "assistant", "content": said + content + more_content}
        thought += more_thought
        return message | ({"reasoning_content": thought} if thought else {})

    def _delta(self, part: Part, answer: Answer, thought: str, content: str) -> Sequence[Json]:
        """An event, unless there is nothing to tell."""
        if content and self._to_say:
            content = self._to_say.pop(answer.index, "") + content
        delta: Json = {"reasoning_content": thought} if thought else {}
        if content:
            delta["content"] = content
        if not delta:
            return ()
        choice = self._choice(answer, delta)
        if self._reply.wanted.alternatives is not None:
            choice["logprobs"] = {"content": self._logprobs(answer)}
        return (self._timed(part, answer, self._event(choice)),)

    def _choice(self, answer: Answer, delta: Json) -> Json:
        return {"finish_reason": None, "index": answer.index, "delta": delta}

    def _opening(self, answer: Answer) -> Sequence[Json]:
        """The first event of a choice, which tells whose words they are."""
        if answer.index in self._opened:
            return ()
        self._opened.add(answer.index)
        return (self._event(self._choice(answer, {"role": "assistant", "content": None})),)


def finish_reason(answer: Answer) -> Literal["stop", "length"]:
    return "stop" if answer.stop_type in ("eos", "word") else "length"
