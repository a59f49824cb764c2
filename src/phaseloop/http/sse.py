"""One streamed response: server-sent events over ASGI, framed byte by byte as clients know them.

    data: {"choices":...}\\n\\n      an event; there are no event names
    :\\n\\n                          a comment, after so many seconds of silence
    data: [DONE]\\n\\n              the end of OpenAI's streams; llama-server's own have none

Nothing is sent before `start`, so that an error can still become a plain answer.  Writing awaits
the server's `send`, which waits for the connection to take the bytes: that is how a client that
reads slowly slows down its own request and nobody else's.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

import msgspec
from starlette.types import Message, Send

EVENT_START, EVENT_END = b"data: ", b"\n\n"
DONE = b"data: [DONE]\n\n"
COMMENT = b":\n\n"
START_AFTER_S = 1.0  # of waiting, so that clients and proxies see an answer coming
HEADERS = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class ClientLeft(Exception):
    """There is nobody to answer any more."""


class EventStream:
    """`comment_after_s` of silence a comment is sent; 0 or below: never."""

    def __init__(self, send: Send, comment_after_s: float) -> None:
        self.has_started = False
        self._send = send
        self._comment_after_s = comment_after_s
        self._encoder = msgspec.json.Encoder()
        self._writing = asyncio.Lock()  # against the comments, which come from a task of their own
        self._now = asyncio.get_running_loop().time
        self._written_s = self._now()

    @asynccontextmanager
    async def attended(self) -> AsyncGenerator[None]:
        """Within, the response starts by itself after a while, and is never silent for long."""
        attendant = asyncio.create_task(self._attend())
        try:
            try:
                yield
            except (ClientLeft, asyncio.CancelledError):
                raise  # the connection is of no more use, and may never take another byte
            except Exception:
                await self._dismiss(attendant)
                raise
            await self._dismiss(attendant)
        finally:
            attendant.cancel()

    async def start(self) -> None:
        """Send status and headers, unless that has been done."""
        if not self.has_started:
            async with self._writing:
                await self._start()

    async def event(self, value: object) -> None:
        """Raises ClientLeft."""
        if not self.has_started:
            await self.start()
        await self._write(EVENT_START + self._encoder.encode(value) + EVENT_END)

    async def end(self, last: bytes = b"") -> None:
        """Outside of `attended`.  Raises ClientLeft."""
        await self._put({"type": "http.response.body", "body": last, "more_body": False})

    async def _start(self) -> None:
        if self.has_started:
            return
        self.has_started = True
        self._written_s = self._now()
        await self._put({"type": "http.response.start", "status": 200, "headers": HEADERS})

    async def _write(self, data: bytes) -> None:
        async with self._writing:
            self._written_s = self._now()
            await self._put({"type": "http.response.body", "body": data, "more_body": True})

    async def _put(self, message: Message) -> None:
        try:
            await self._send(message)
        except OSError as error:  # as ASGI says of servers that tell
            raise ClientLeft from error

    async def _attend(self) -> None:
        with suppress(ClientLeft):
            await asyncio.sleep(START_AFTER_S)
            await self.start()
            while self._comment_after_s > 0:
                silent_s = self._now() - self._written_s
                if silent_s < self._comment_after_s:
                    await asyncio.sleep(self._comment_after_s - silent_s)
                else:
                    await self._write(COMMENT)

    async def _dismiss(self, attendant: asyncio.Task[None]) -> None:
        async with self._writing:  # since a write must not be cut in two
            attendant.cancel()
