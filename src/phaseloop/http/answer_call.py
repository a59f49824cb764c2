"""One call from its posting to the last byte of its answer, streamed or in one piece."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress

import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from phaseloop.runtime.gateway import Begun, Delivered, Ended, Progress

from .answer import Answer
from .answer_reply import Part, Reply, Whole
from .errors import ApiError, error_response, json_response
from .request import Shape, Wanted
from .request_prompt import Prompt
from .served import Served
from .sse import DONE, ClientLeft, EventStream
from .stream import closed_on_disconnect, items_of
from .wire import Wire
from .wire_native import Native
from .wire_openai import Chat, Completion

WIRES: dict[Shape, type[Native] | type[Completion] | type[Chat]] = {
    "native": Native,
    "completion": Completion,
    "chat": Chat,
}

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class Answered:
    """Posts the call when one of its two methods is awaited."""

    def __init__(
        self, wanted: Wanted, prompts: tuple[Prompt, ...], served: Served, build: str
    ) -> None:
        self._wanted = wanted
        self._prompts = prompts
        self._served = served
        self._build = build

    async def in_one_piece(self, receive: Receive) -> Response:
        async with self._posted(receive) as (reply, wire):
            wholes = [(part, answer, Whole()) for part in reply.parts for answer in part.answers]
            try:
                await self._collect(reply, wholes)
            except ClientLeft:
                return Response(status_code=499)  # nobody reads it
            return json_response(wire.body(wholes))

    async def streamed(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        events = EventStream(send, self._wanted.ping_interval_s)
        with suppress(ClientLeft):
            async with self._posted(receive) as (reply, wire):
                error = await self._failure(reply, wire, events)
                if error is None:
                    await events.end(DONE if wire.ends_with_done else b"")
                elif events.has_started:
                    await events.event(error.body())
                    await events.end()
                else:
                    await error_response(error)(scope, receive, send)

    async def _failure(self, reply: Reply, wire: Wire, events: EventStream) -> ApiError | None:
        """Send what there is; the error that ended it, if one did."""
        try:
            async with events.attended():
                await self._send_events(reply, wire, events)
        except ApiError as error:
            return error
        except ClientLeft:
            raise
        except Exception:  # of ours: the client is told in the stream, since it has begun
            log.exception("an answer failed")
            return ApiError("server_error", "Internal error; the server's log says more")
        return None

    @asynccontextmanager
    async def _posted(self, receive: Receive) -> AsyncGenerator[tuple[Reply, Wire]]:
        served = self._served
        reply = Reply(self._wanted, self._prompts, served, self._build)
        async with closed_on_disconnect(reply.call, receive):
            for stream in reply.call.streams:
                served.began(stream)
            try:
                yield reply, WIRES[self._wanted.shape](reply)
            finally:
                reply.call.close()
                for stream in reply.call.streams:
                    served.ended(stream)

    async def _send_events(self, reply: Reply, wire: Wire, events: EventStream) -> None:
        wanted = reply.wanted
        limits = self._served.service.limits
        async with aclosing(items_of(reply.parts, limits)) as items:
            async for part, item in items:
                match item:
                    case Delivered():
                        answer = part.answers[item.choice]
                        if answer.is_over:
                            continue
                        text = self._take(part, answer, item)
                        for chunk in wire.chunks(part, answer, text, item.ids):
                            await events.event(chunk)
                    case Ended():
                        answer = part.answers[item.choice]
                        rest = answer.end(item.reason, wanted.limit)
                        if rest or answer.has_entries:
                            for chunk in wire.chunks(part, answer, rest, ()):
                                await events.event(chunk)
                        reply.open_choices -= 1
                        for chunk in wire.finals(part, answer, is_last=not reply.open_choices):
                            await events.event(chunk)
                    case Begun():
                        reply.begun(part)
                        await events.start()
                        if wanted.return_progress:
                            await events.event(wire.progress(part, is_first=True))
                    case Progress():
                        if wanted.return_progress:
                            await events.event(wire.progress(part, is_first=False))

    async def _collect(self, reply: Reply, wholes: Sequence[tuple[Part, Answer, Whole]]) -> None:
        wanted = reply.wanted
        by_index = {answer.index: whole for _, answer, whole in wholes}
        limits = self._served.service.limits
        async with aclosing(items_of(reply.parts, limits)) as items:
            async for part, item in items:
                match item:
                    case Delivered():
                        answer = part.answers[item.choice]
                        if answer.is_over:
                            continue
                        whole = by_index[answer.index]
                        whole.texts.append(self._take(part, answer, item))
                        whole.entries += answer.take_entries()
                        if wanted.return_tokens:
                            whole.ids += item.ids
                    case Ended():
                        answer = part.answers[item.choice]
                        whole = by_index[answer.index]
                        whole.texts.append(answer.end(item.reason, wanted.limit))
                        whole.entries += answer.take_entries()
                    case Begun():
                        reply.begun(part)
                    case Progress():
                        pass

    def _take(self, part: Part, answer: Answer, item: Delivered) -> str:
        """The text of a delivery; the engine is told if it ends the choice."""
        text = answer.take(item)
        after_ns = self._wanted.newline_after_ns
        if after_ns is not None and "\n" in text and not answer.is_over:
            opened_ns = part.stream.timing.opened_ns
            if opened_ns is not None and self._served.service.clock.now_ns() - opened_ns > after_ns:
                answer.stop_at_limit()
        if answer.is_over:
            part.stream.stop_matched(item.choice)
        return text
