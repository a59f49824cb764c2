"""The routes that generate: a request is checked, tokenised, posted and answered.

Everything that can be refused is refused before the answer begins, as a plain error: a bad field, a
prompt that does not fit, a full queue.  A streamed answer begins when the engine begins with the
prompt, or after a second of waiting; errors after that are events of the stream.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, asynccontextmanager
from datetime import UTC, datetime

import structlog
from msgspec import Struct
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from phaseloop.runtime.gateway import Begun, Delivered, Ended, Progress

from .answer import Answer
from .answer_reply import Part, Reply, Whole
from .body import parse_object
from .chat_reasoning import start_of
from .errors import ApiError, error_response, json_response
from .request import Shape, Wanted, wanted_of
from .request_chat import conversation_of
from .request_fields import Fields
from .request_prompt import Prompt, check_fit, prompts_of, text_prompt
from .served import HttpOptions, Served, options_of, served_of
from .sse import DONE, EventStream
from .stream import ClientLeft, closed_on_disconnect, items_of
from .table import post
from .wire import Wire
from .wire_native import Native
from .wire_openai import Chat, Completion

WIRES: dict[Shape, type[Native] | type[Completion] | type[Chat]] = {
    "native": Native,
    "completion": Completion,
    "chat": Chat,
}

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class Prepared(Struct, frozen=True):
    wanted: Wanted
    prompts: tuple[Prompt, ...]


async def native(request: Request) -> ASGIApp:
    return await generate(request, "native")


async def completion(request: Request) -> ASGIApp:
    return await generate(request, "completion")


async def chat(request: Request) -> ASGIApp:
    return await generate(request, "chat")


ROWS = (
    post(native, "/completion", "/completions"),
    post(completion, "/v1/completions"),
    post(chat, "/v1/chat/completions", "/chat/completions"),
)


async def generate(request: Request, shape: Shape) -> ASGIApp:
    served, http = served_of(request), options_of(request)
    raw = await request.body()
    now = datetime.now(tz=UTC).astimezone()
    prepared = await served.in_thread(prepare, raw, shape, served, http, now)
    answered = Answered(prepared, served, http)
    if prepared.wanted.stream:
        return answered.streamed
    return await answered.in_one_piece(request.receive)


def prepare(raw: bytes, shape: Shape, served: Served, http: HttpOptions, now: datetime) -> Prepared:
    """All that comes before posting.  Takes time in proportion to the text: runs in a thread."""
    fields = Fields(parse_object(raw))
    wanted = wanted_of(fields, shape, served, http)
    limits, tokenizer = served.service.limits, served.tokenizer
    if shape == "chat":
        prompts: tuple[Prompt, ...] = (chat_prompt(fields, wanted, served, now),)
    else:
        prompts = prompts_of(fields.raw.get("prompt"), tokenizer, limits)
    for prompt in prompts:
        check_fit(prompt, wanted.limit, limits)
    if shape == "native" or wanted.echo or wanted.verbose:
        prompts = tuple(replace(p, shown=tokenizer.decode(p.tokens)) for p in prompts)
    return Prepared(wanted, prompts)


def chat_prompt(fields: Fields, wanted: Wanted, served: Served, now: datetime) -> Prompt:
    conversation = conversation_of(fields, served, now)
    prompt = replace(text_prompt(conversation.text, served.tokenizer), said=conversation.said)
    if wanted.reasoning_format == "none" or served.template is None:
        return prompt
    is_thinking = conversation.is_thinking
    thought = "opened" if is_thinking else start_of(conversation.text, served.template.source)
    return replace(prompt, thought=thought)


class Answered:
    """One call, from its posting to the last byte of its answer."""

    def __init__(self, prepared: Prepared, served: Served, http: HttpOptions) -> None:
        self._prepared = prepared
        self._served = served
        self._http = http

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
        events = EventStream(send, self._prepared.wanted.ping_interval_s)
        error: ApiError | None = None
        async with self._posted(receive) as (reply, wire):
            try:
                async with events.attended():
                    await self._send_events(reply, wire, events)
            except ClientLeft:
                return
            except ApiError as raised:
                error = raised
            except Exception:
                log.exception("an answer failed in mid-stream")
                error = ApiError("server_error", "internal error; the server's log says more")
            if error is None:
                await events.end(DONE if wire.ends_with_done else b"")
            elif events.has_started:
                await events.event(error.body())
                await events.end()
            else:
                await error_response(error)(scope, receive, send)

    @asynccontextmanager
    async def _posted(self, receive: Receive) -> AsyncGenerator[tuple[Reply, Wire]]:
        prepared, served = self._prepared, self._served
        reply = Reply(prepared.wanted, prepared.prompts, served, self._http.build)
        async with closed_on_disconnect(reply.call, receive):
            for stream in reply.call.streams:
                served.began(stream)
            try:
                yield reply, WIRES[prepared.wanted.shape](reply)
            finally:
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
                        if rest:
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
        after_ns = self._prepared.wanted.newline_after_ns
        if after_ns is not None and "\n" in text and not answer.is_over:
            opened_ns = part.stream.timing.opened_ns
            if opened_ns is not None and self._served.service.clock.now_ns() - opened_ns > after_ns:
                answer.stop_at_limit()
        if answer.is_over:
            part.stream.stop_matched(item.choice)
        return text
