"""What the shapes of an answer have in common: the JSON values they make of it, event by event."""

from collections.abc import Sequence
from typing import Protocol

from .answer import Answer
from .answer_reply import Part, Reply, Whole
from .request_fields import Json

NS_PER_MS = 1_000_000


class Wire(Protocol):
    """One answer's events, if it is streamed, or its body; made for one Reply."""

    ends_with_done: bool  # whether `[DONE]` follows a stream's last event

    def progress(self, part: Part, *, is_first: bool) -> Json:
        """How far the prompt is; the first time, where it begins."""
        ...

    def chunks(self, part: Part, answer: Answer, text: str, ids: Sequence[int]) -> Sequence[Json]:
        """What one delivery added to a choice; nothing if nothing can be shown yet."""
        ...

    def finals(self, part: Part, answer: Answer, *, is_last: bool) -> Sequence[Json]:
        """The end of a choice, and of the whole call if it is the last one."""
        ...

    def body(self, wholes: Sequence[tuple[Part, Answer, Whole]]) -> Json | list[Json]:
        """The answer in one piece; choices by their index."""
        ...


def prompt_progress(reply: Reply, part: Part, *, is_first: bool) -> Json:
    timing, total = part.stream.timing, part.stream.request.prompt_length
    begun_ns, now_ns = timing.begun_ns, reply.served.service.clock.now_ns()
    processed = timing.cached if is_first else min(total, timing.cached + timing.processed)
    progress: Json = {
        "total": total,
        "cache": timing.cached,
        "processed": processed,
        "time_ms": 0 if begun_ns is None else max(0, now_ns - begun_ns) // NS_PER_MS,
    }
    return {"prompt_progress": progress}
