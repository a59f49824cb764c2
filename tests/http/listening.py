"""The application behind a real socket, as Hypercorn serves it, and clients that send raw bytes."""

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from hypercorn.asyncio import serve
from hypercorn.config import Config
from starlette.applications import Starlette

TIMEOUT_S = 20


@asynccontextmanager
async def listening(app: Starlette) -> AsyncGenerator[int]:
    """The port on which the application listens; its lifespan is the server's matter."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    config = Config()
    config.bind = [f"fd://{listener.detach()}"]
    config.include_server_header = False
    config.errorlog = config.accesslog = None
    stop = asyncio.Event()
    serving = asyncio.create_task(serve(app, config, shutdown_trigger=stop.wait))
    try:
        yield port
    finally:
        stop.set()
        await serving


async def send_raw(port: int, raw: bytes, *, ends: bool = False) -> bytes:
    """All that comes back.  `ends`: the client sends nothing more and says so."""
    async with asyncio.timeout(TIMEOUT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(raw)
            await writer.drain()
            if ends:
                writer.write_eof()
            return await reader.read()
        finally:
            writer.close()
