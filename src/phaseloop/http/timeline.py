"""What each slot does, as it happens: server-sent events for the live page and `phaseloop top`.

    data: {"now_ns": 10, "records": [...], "head": {...}}     how everything stands
    data: {"now_ns": 20, "records": [...]}                    what has changed since

The records are those of runtime/timeline.py.  Nothing is recorded while nobody watches.
"""

import asyncio
from typing import cast

import msgspec
from starlette.requests import HTTPConnection, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from phaseloop.runtime.service import Service

from .errors import error_response, unavailable
from .served import served_of, serving_of
from .sse import EventStream
from .table import get
from .timeline_feed import VIEWERS_MAX, Crowded, Feed, Viewer

COMMENTS_NEVER = 0  # seconds; the time is told every second anyway


async def events(request: Request) -> ASGIApp:
    return Watching(feed_of(request), served_of(request).service, serving_of(request).started)


class Watching:
    """One viewer's stream, an ASGI application."""

    def __init__(self, feed: Feed, service: Service, started: int) -> None:
        self._feed = feed
        self._service = service
        self._started = started

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "HEAD":  # there is no end to wait for
            stream = EventStream(send, COMMENTS_NEVER)
            await stream.start()
            await stream.end()
            return
        try:
            with self._feed.watched(self._service, self._started) as viewer:
                await self._tell(viewer, receive, send)
        except Crowded:
            problem = f"{VIEWERS_MAX} watch the timeline already, which is the most that may"
            await error_response(unavailable(problem))(scope, receive, send)

    async def _tell(self, viewer: Viewer, receive: Receive, send: Send) -> None:
        stream = EventStream(send, COMMENTS_NEVER)
        await stream.start()
        leaving = asyncio.create_task(ended_on_disconnect(viewer, receive))
        try:
            async for batch in viewer:
                await stream.event(msgspec.Raw(batch))
        finally:
            leaving.cancel()
        await stream.end()


async def ended_on_disconnect(viewer: Viewer, receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    viewer.end()


def feed_of(connection: HTTPConnection) -> Feed:
    return cast(Feed, connection.app.state.feed)


ROWS = (get(events, "/phase/events"),)
