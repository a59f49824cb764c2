"""The answer of /completion, in llama-server's own shape."""

from collections.abc import Sequence
from typing import Any, cast

from .answer import Answer
from .answer_reply import Part, Reply, Whole
from .request_fields import Json
from .wire import prompt_progress
from .wire_logprobs import probabilities
from .wire_settings import settings_of

STREAMED = Whole()  # what was streamed is not said again at the end


class Native:
    ends_with_done = False

    def __init__(self, reply: Reply) -> None:
        self._reply = reply

    def progress(self, part: Part, *, is_first: bool) -> Json:
        chunk = self._chunk(part, part.answers[0], "", ())
        return chunk | prompt_progress(self._reply, part, is_first=is_first)

    def chunks(self, part: Part, answer: Answer, text: str, ids: Sequence[int]) -> Sequence[Json]:
        chunk = self._chunk(part, answer, text, ids)
        entries = answer.take_entries()
        wanted = self._reply.wanted
        if wanted.alternatives is not None and entries:
            found = probabilities(entries, wanted, self._reply.served.tokenizer)
            chunk["completion_probabilities"] = found
        if wanted.timings_per_token:
            chunk["timings"] = part.work((answer,)).as_timings()
        return (chunk,)

    def finals(self, part: Part, answer: Answer, *, is_last: bool) -> Sequence[Json]:
        return (self.final(part, answer, STREAMED),)

    def body(self, wholes: Sequence[tuple[Part, Answer, Whole]]) -> Json | list[Json]:
        made = [self.final(*whole) for whole in wholes]
        return made[0] if len(made) == 1 else made

    def final(self, part: Part, answer: Answer, whole: Whole) -> Json:
        reply, length = self._reply, part.stream.request.prompt_length
        made: Json = {
            "index": answer.index,
            "content": whole.text,
            "tokens": whole.ids,
            "id_slot": part.slot_of(answer),
            "stop": True,
            "model": reply.model,
            "tokens_predicted": answer.predicted,
            "tokens_evaluated": length,
            "generation_settings": settings_of(
                reply.wanted,
                part.stream.content.seed,
                reply.served.service.description.drafters,
            ),
            "prompt": part.prompt.shown,
            "has_new_line": answer.has_new_line,
            "truncated": answer.truncated,
            "stop_type": answer.stop_type,
            "stopping_word": answer.stopping_word,
            # The last token's own state is never computed.
            "tokens_cached": length + max(0, answer.predicted - 1),
            "timings": part.work((answer,)).as_timings(),
        }
        if whole.entries:
            found = probabilities(whole.entries, reply.wanted, reply.served.tokenizer)
            made["completion_probabilities"] = found
        if reply.wanted.timing_field:
            made["phaseloop"] = reply.spans(part)
        fields = reply.wanted.response_fields
        return picked(fields, made) if fields else made

    def _chunk(self, part: Part, answer: Answer, text: str, ids: Sequence[int]) -> Json:
        return {
            "index": answer.index,
            "content": text,
            "tokens": ids,
            "stop": False,
            "id_slot": part.slot_of(answer),
            "tokens_predicted": answer.predicted,
            "tokens_evaluated": part.stream.request.prompt_length,
        }


def picked(fields: Sequence[str], whole: Json) -> Json:
    """Some fields alone; a path with slashes leads inwards, and stays the name of what it finds."""
    made: Json = {}
    for path in fields:
        found: Any = whole
        for name in path.split("/"):
            if not isinstance(found, dict) or name not in found:
                break
            found = cast(Json, found)[name]
        else:
            made[path] = found
    return made
