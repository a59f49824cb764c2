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
from contextlib import asynccontextmanager

import msgspec
from starlette.types import Send

EVENT_START, EVENT_END = b"data: ", b"\n\n"
DONE = b"data: [DONE]\n\n"
COMMENT = b":\n\n"
START_AFTER_S = 1.0  # of waiting, so that clients and proxies see an answer coming
HEADERS = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


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
            yield
        finally:
            # Holding the lock, since a write must not be cut in two.
            async with self._writing:
                attendant.cancel()

    async def start(self) -> None:
        """Send status and headers, unless that has been done."""
        if not self.has_started:
            async with self._writing:
                await self._start()

    async def event(self, value: object) -> None:
        if not self.has_started:
            await self.start()
        data = EVENT_START + self._encoder.encode(value) + EVENT_END
        async with self._writing:
            self._written_s = self._now()
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, last: bytes = b"") -> None:
        """Outside of `attended`."""
        await self._send({"type": "http.response.body", "body": last, "more_body": False})

    async def _start(self) -> None:
        if self.has_started:
            return
        self.has_started = True
        self._written_s = self._now()
        await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS})

    async def _attend(self) -> None:
        await asyncio.sleep(START_AFTER_S)
        await self.start()
        while self._comment_after_s > 0:
            silent_s = self._now() - self._written_s
            if silent_s < self._comment_after_s:
                await asyncio.sleep(self._comment_after_s - silent_s)
                continue
            async with self._writing:
                self._written_s = self._now()
                await self._send({"type": "http.response.body", "body": COMMENT, "more_body": True})
