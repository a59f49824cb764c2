"""A small HTTP client for measuring servers: plain requests, and streams of server-sent events.

It speaks HTTP/1.1 through h11 and stamps each event when its bytes came in.  One connection per
request, as short-lived clients have it, so nothing of one request waits behind another.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Self
from urllib.parse import urlsplit

import h11
import msgspec
from msgspec import Struct

READ_BYTES = 1 << 16
EVENT_BYTES_MAX = 1 << 24
PREFIX = b"data:"


class ClientError(Exception):
    """The server could not be reached, or does not speak as it should."""


class Address(Struct, frozen=True):
    host: str
    port: int
    path: str  # before every route, without a slash at its end
    is_tls: bool

    @classmethod
    def parse(cls, url: str) -> Self:
        """Raises ClientError for what is no http or https address."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError as error:
            raise ClientError(f"{url}: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ClientError(f"{url}: an address like http://127.0.0.1:8080 is expected")
        is_tls = parts.scheme == "https"
        port = port if port is not None else 443 if is_tls else 80
        return cls(parts.hostname, port, parts.path.rstrip("/"), is_tls)


class Event(Struct, frozen=True):
    """The data of one server-sent event, and when it came (monotonic nanoseconds)."""

    at_ns: int
    data: bytes


class Exchange:
    """One request and its answer.  Use it as an async context manager; leaving it hangs up."""

    def __init__(
        self,
        address: Address,
        method: str,
        route: str,
        body: object = None,
        *,
        api_key: str | None = None,
    ) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self._address = address
        self._connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=EVENT_BYTES_MAX)
        self._payload = b"" if body is None else msgspec.json.encode(body)
        headers = [
            ("Host", f"{address.host}:{address.port}"),
            ("Content-Length", str(len(self._payload))),
            ("Content-Type", "application/json"),
            ("Connection", "close"),
        ]
        if api_key is not None:
            headers.append(("Authorization", f"Bearer {api_key}"))
        self._request = h11.Request(method=method, target=address.path + route, headers=headers)
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    async def __aenter__(self) -> Self:
        """Send the request and wait for the answer's head.  Raises ClientError."""
        address, connection = self._address, self._connection
        try:
            self._reader, self._writer = await asyncio.open_connection(
                address.host, address.port, ssl=address.is_tls or None, limit=1 << 20
            )
        except OSError as error:
            where = f"{address.host}:{address.port}"
            raise ClientError(f"{where} cannot be reached: {error.strerror or error}") from None
        try:
            self._writer.write(connection.send(self._request) or b"")
            self._writer.write(connection.send(h11.Data(data=self._payload)) or b"")
            self._writer.write(connection.send(h11.EndOfMessage()) or b"")
            head = await self._next()
            while isinstance(head, h11.InformationalResponse):
                head = await self._next()
            if not isinstance(head, h11.Response):
                raise ClientError("the connection was closed without an answer")
        except BaseException:
            self._writer.close()
            raise
        self.status = head.status_code
        self.headers = {name.decode(): value.decode("latin-1") for name, value in head.headers}
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    async def body(self) -> bytes:
        parts = [bytes(part) async for part in self._parts()]
        return b"".join(parts)

    async def events(self) -> AsyncIterator[Event]:
        """The events with data; comments are skipped.  Ends with the answer."""
        rest = b""
        async for part in self._parts():
            at_ns = time.monotonic_ns()
            *blocks, rest = (rest + part).replace(b"\r\n", b"\n").split(b"\n\n")
            for block in blocks:
                lines = block.split(b"\n")
                data = [line[len(PREFIX) :].lstrip() for line in lines if line.startswith(PREFIX)]
                if data:
                    yield Event(at_ns, b"\n".join(data))

    async def _parts(self) -> AsyncIterator[bytes]:
        while isinstance(event := await self._next(), h11.Data):
            yield event.data
        if not isinstance(event, h11.EndOfMessage):
            raise ClientError("the answer was cut off")

    async def _next(self) -> object:
        try:
            while (event := self._connection.next_event()) is h11.NEED_DATA:
                self._connection.receive_data(await self._reader.read(READ_BYTES))
            return event
        except h11.RemoteProtocolError as error:
            raise ClientError(f"the answer is not HTTP, or was cut off: {error}") from None
        except OSError as error:
            raise ClientError(f"the connection broke: {error.strerror or error}") from None
