"""The application behind a real HTTP server, on a port of its own of the loopback interface."""

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from http_world import app_of, until_loaded
from hypercorn.asyncio import serve
from hypercorn.config import Config
from msgspec import Struct
from starlette.applications import Starlette

from phaseloop.engine.protocol import Engine
from phaseloop.http.served import Served


class Listening(Struct):
    app: Starlette
    port: int
    served: Served

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@asynccontextmanager
async def listening(engine: Engine, **fields: Any) -> AsyncGenerator[Listening]:
    """`fields` are those of `http_world.app_of`."""
    app = app_of(engine, **fields)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    config = Config()
    config.bind = [f"fd://{listener.detach()}"]  # the server closes it
    config.errorlog = None
    closing = asyncio.Event()
    application: Any = app
    serving = asyncio.create_task(serve(application, config, shutdown_trigger=closing.wait))
    await until_open(app, serving)
    try:
        yield Listening(app, port, await until_loaded(app))
    finally:
        closing.set()
        await serving


async def until_open(app: Any, serving: asyncio.Task[None]) -> None:
    """The lifespan begins only once the server runs."""
    while app.state.serving.served is None:
        assert not serving.done(), serving
        await asyncio.sleep(0)
