"""A whole server without a socket: the application, a service on a scripted engine, a client."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
from msgspec import Struct
from scripted import ScriptedEngine
from starlette.applications import Starlette
from vocabularies import bpe_tokenizer

from phaseloop.core.policy import PRESETS
from phaseloop.core.vocabulary import Lane, LaunchRound, Result, RoundKind
from phaseloop.engine.protocol import Engine, limits_of
from phaseloop.http.app import create_app
from phaseloop.http.served import HttpOptions, ModelCard, Served
from phaseloop.runtime.service import Service

CARD = ModelCard(
    aliases=("tiny", "small"),
    path="models/tiny.gguf",
    size=1_000_000,
    ftype="Q4_0",
    architecture="llama",
    vocab_type=2,
    n_vocab=526,
    n_ctx=4096,
    n_ctx_train=8192,
    n_embd=64,
    n_params=2_000_000,
)
DEFAULTS = HttpOptions()
TURNS_MAX = 10_000
HOLD_S = 30


class TextEngine(ScriptedEngine):
    """A scripted engine whose tokens stand for bytes, as the test vocabulary's first 256 do."""

    def _lane(self, lane: Lane) -> tuple[Result, tuple[int, ...]]:
        result, tokens = super()._lane(lane)
        return result, tuple(token % 256 for token in tokens)


class Hold:
    """Holds an engine in its nth round of a kind until the test has looked around.

    To be made in the event loop's thread, and called in the engine's.
    """

    def __init__(self, kind: RoundKind, nth: int = 1) -> None:
        self.reached = asyncio.Event()
        self._kind = kind
        self._rounds_before = nth - 1
        self._go_on = threading.Event()
        self._loop = asyncio.get_running_loop()

    def __call__(self, launch: LaunchRound) -> None:
        if launch.kind != self._kind or self._go_on.is_set():
            return
        if self._rounds_before:
            self._rounds_before -= 1
            return
        self._loop.call_soon_threadsafe(self.reached.set)
        assert self._go_on.wait(HOLD_S), "the test let nobody go on"

    def let_go(self) -> None:
        self._go_on.set()


class World(Struct):
    app: Starlette
    client: httpx.AsyncClient
    service: Service
    served: Served


def client_of(app: Starlette) -> httpx.AsyncClient:
    """A client that gets to see what a browser would: an exception of the app fails the test."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=True)
    return httpx.AsyncClient(transport=transport, base_url="http://server")


@asynccontextmanager
async def started(app: Starlette) -> AsyncGenerator[None]:
    """The application's life as a server lives it: startup, then shutdown."""
    inbox: asyncio.Queue[dict[str, str]] = asyncio.Queue()
    outbox: asyncio.Queue[Any] = asyncio.Queue()
    scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}
    life = asyncio.create_task(app(scope, inbox.get, outbox.put))
    inbox.put_nowait({"type": "lifespan.startup"})
    assert (await outbox.get())["type"] == "lifespan.startup.complete"
    try:
        yield
    finally:
        inbox.put_nowait({"type": "lifespan.shutdown"})
        await life
    assert outbox.get_nowait()["type"] == "lifespan.shutdown.complete"


async def until(is_so: Callable[[], bool]) -> None:
    """Let the event loop turn until something that takes no time has happened."""
    for _ in range(TURNS_MAX):
        if is_so():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never happened")


async def until_loaded(app: Starlette) -> Served:
    serving = app.state.serving
    await until(lambda: serving.served is not None or serving.failure is not None)
    assert serving.served is not None, serving.failure
    return serving.served


def app_of(
    engine: Engine | None = None,
    options: HttpOptions = DEFAULTS,
    policy: str = "barrier-fair",
    **fields: Any,
) -> Starlette:
    """`fields` are those of Served."""
    engine = engine or TextEngine()
    limits = fields.pop("limits", limits_of(engine.describe()))

    @asynccontextmanager
    async def open_served() -> AsyncGenerator[Served]:
        async with Service(engine, limits, PRESETS[policy], seeds=lambda: 7) as service:
            given = {"tokenizer": bpe_tokenizer(), "model": CARD, "created": 1_700_000_000}
            yield Served(service=service, **(given | fields))

    return create_app(options, open_served, on_exchange=lambda _exchange: None)


@asynccontextmanager
async def world(
    engine: Engine | None = None,
    options: HttpOptions = DEFAULTS,
    policy: str = "barrier-fair",
    **fields: Any,
) -> AsyncGenerator[World]:
    """The application with a model loaded, and a client; the arguments are those of app_of."""
    app = app_of(engine, options, policy, **fields)
    async with started(app), client_of(app) as client:
        served = await until_loaded(app)
        yield World(app, client, served.service, served)
