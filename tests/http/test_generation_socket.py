"""Goal: over a socket, too, who leaves frees the slot, and who does not read is parked alone.

Method: the application behind Hypercorn, and a client that speaks HTTP by hand, so that it can
close the connection or leave its bytes unread at a moment of its choice.
"""

import asyncio
import itertools
import json
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from socket_server import Listening, listening
from storyteller import Storyteller

pytestmark = pytest.mark.asyncio

TEXT = "the quick brown fox"
HANG_S = 30


@asynccontextmanager
async def connected(
    server: Listening, receive_bytes: int | None = None, **body: Any
) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection over which a request has been sent."""
    raw = socket.socket()
    if receive_bytes is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    raw.setblocking(False)
    await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", server.port))
    reader, writer = await asyncio.open_connection(sock=raw, limit=1 << 16)
    content = json.dumps({"prompt": [1, 2, 3], **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    await writer.drain()
    try:
        yield reader, writer
    finally:
        writer.close()


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANG_S):
        for _ in itertools.count():
            if is_so():
                return
            await asyncio.sleep(0)


def is_idle(server: Listening) -> bool:
    state = server.served.service.state
    return not any(state.slots) and not state.queue


async def test_the_head_of_a_stream():
    async with (
        listening(Storyteller(TEXT)) as server,
        connected(server, stream=True) as (reader, _),
    ):
        head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    lines = head.lower().split(b"\r\n")
    assert b"content-type: text/event-stream" in lines
    assert b"x-accel-buffering: no" in lines
    assert b"transfer-encoding: chunked" in lines


async def test_the_head_comes_before_the_first_token():
    """The engine is held in the prompt's round until the client has seen the head."""
    engine = Storyteller(TEXT)
    async with listening(engine) as server:
        engine.gate.clear()
        async with connected(server, stream=True) as (reader, _):
            head = await reader.readuntil(b"\r\n\r\n")
            await until(lambda: engine.launches)  # its thread may hear of the round after us
            assert [launch.kind for launch in engine.launches] == ["prefill"]
            engine.gate.set()
            assert head.startswith(b"HTTP/1.1 200")
            await reader.readuntil(b"[DONE]")


@pytest.mark.parametrize("stream", [False, True])
async def test_who_leaves_while_generating_frees_the_slot(stream):
    engine = Storyteller(TEXT, ends=False, context_length=1 << 20, page_count=1 << 12)
    async with listening(engine) as server:
        async with connected(server, stream=stream):
            await until(lambda: len(engine.launches) > 5)
        await until(lambda: is_idle(server))
        assert server.served.service.watch.counters.ends == {"cancelled": 1}


@pytest.mark.parametrize("stream", [False, True])
async def test_who_leaves_while_waiting_leaves_the_queue(stream):
    engine = Storyteller(TEXT, ends=False, slot_count=1)
    async with listening(engine) as server:
        engine.gate.clear()
        async with connected(server, stream=True, max_tokens=50) as (reader, _):
            await until(lambda: len(engine.launches) == 1)
            async with connected(server, stream=stream):
                await until(lambda: len(server.served.service.state.queue) == 1)
            await until(lambda: not server.served.service.state.queue)
            engine.gate.set()
            await reader.readuntil(b"[DONE]")
    assert server.served.service.watch.counters.ends == {"cancelled": 1, "length": 1}


async def test_who_does_not_read_is_parked_and_others_go_on():
    """The server's `send` waits for the connection, so unread tokens pile up in the outbox."""
    engine = Storyteller(TEXT, ends=False, context_length=1 << 20, page_count=1 << 13)

    def is_parked() -> bool:
        slots = server.served.service.state.slots
        return any(s is not None and s.stalled_until_ns is not None for s in slots)

    async with listening(engine) as server:
        long = {"stream": True, "max_tokens": 100_000, "logprobs": 2, "timings_per_token": True}
        async with connected(server, receive_bytes=4096, **long):
            await until(is_parked)
            launches = len(engine.launches)
            async with connected(server, stream=True, max_tokens=20) as (reader, _):
                await reader.readuntil(b"[DONE]")
            assert is_parked(), "nobody has read"
            assert len(engine.launches) - launches < 50
        await until(lambda: is_idle(server))
    assert server.served.service.watch.counters.ends == {"cancelled": 1, "length": 1}
