"""The HTTP application: its routes, what guards them, and when there is something to serve."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeAlias

import structlog
from msgspec.structs import replace
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from phaseloop.runtime.gateway import Stream

from . import (
    adapter_routes,
    completion_routes,
    embedding_routes,
    health,
    later,
    metrics,
    models,
    page,
    phase,
    props,
    slot_actions,
    slots,
    timeline,
    tokens,
)
from .auth import ApiKeys
from .cors import ANY, Cors
from .errors import ApiError, render_api_error, render_http_exception
from .guard import BodyLimit, Envelope, Exchange, Faults, Gate
from .histograms import Durations
from .served import HttpOptions, Served, Serving
from .table import Row, routes_of
from .timeline_feed import Feed

OpenServed: TypeAlias = Callable[[], AbstractAsyncContextManager[Served]]

ROWS: tuple[Row, ...] = (
    *page.ROWS,
    *health.ROWS,
    *models.ROWS,
    *props.ROWS,
    *slots.ROWS,
    *slot_actions.ROWS,
    *phase.ROWS,
    *timeline.ROWS,
    *metrics.ROWS,
    *tokens.ROWS,
    *completion_routes.ROWS,
    *embedding_routes.ROWS,
    *adapter_routes.ROWS,
    *later.ROWS,
)
NEEDS_NO_MODEL = page.PATHS
NEEDS_NO_KEY = (*page.PATHS, "/health", "/v1/health")

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


def log_failure(error: BaseException) -> None:
    log.error("there is nothing to serve", reason=str(error) or type(error).__name__)


def log_exchange(exchange: Exchange) -> None:
    log.debug(
        "http",
        method=exchange.method,
        path=exchange.path,
        status=exchange.status,
        client=exchange.client,
        ms=round(exchange.duration_ns / 1e6, 3),
    )


def create_app(
    options: HttpOptions,
    open_served: OpenServed,
    *,
    on_failed: Callable[[BaseException], None] = log_failure,
    on_exchange: Callable[[Exchange], None] = log_exchange,
) -> Starlette:
    """An application that answers at once, with 503 until `open_served` has been entered.

    `open_served` is entered when the application starts and left when it ends, both in the
    background; it must not block the event loop.  Should it raise, `on_failed` is told, and the
    answer stays 503: whoever runs the server decides what then.  `on_exchange` hears of every HTTP
    request once its answer is out.  Serve it by any ASGI server that has lifespan events.
    """
    serving = Serving(options)
    prefix = options.prefix.strip("/")
    prefix = f"/{prefix}" if prefix else ""
    app = Starlette(
        routes=routes_of(ROWS, prefix),
        middleware=[
            Middleware(Envelope, on_exchange),
            Middleware(Cors, options.cors_origins),
            Middleware(Faults),
            Middleware(Gate, serving, [prefix + path for path in NEEDS_NO_MODEL]),
            Middleware(ApiKeys, options.api_keys, [prefix + path for path in NEEDS_NO_KEY]),
            Middleware(BodyLimit, options.body_bytes_max),
        ],
        exception_handlers={ApiError: render_api_error, HTTPException: render_http_exception},
        lifespan=lifespan_of(serving, open_served, on_failed),
    )
    app.router.redirect_slashes = False
    app.state.serving = serving
    app.state.feed = Feed()
    return app


def measured(served: Served, durations: Durations) -> Served:
    """The same, with the durations of its requests counted beside what else is made of them."""

    def ended(stream: Stream) -> None:
        durations.observe(stream)
        served.ended(stream)

    return replace(served, ended=ended)


def lifespan_of(
    serving: Serving, open_served: OpenServed, on_failed: Callable[[BaseException], None]
) -> Callable[[Starlette], AbstractAsyncContextManager[None]]:
    async def hold(leave: asyncio.Event) -> None:
        try:
            async with open_served() as served:
                serving.served = measured(served, serving.durations)
                await leave.wait()
                serving.served = None
        except Exception as error:
            serving.failure = error
            on_failed(error)
        finally:
            serving.served = None

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncGenerator[None]:
        if not serving.options.api_keys and ANY in serving.options.cors_origins:
            log.warning("no API key is set: pages of any origin may use this server")
        leave = asyncio.Event()
        holding = asyncio.create_task(hold(leave), name="phaseloop-served")
        try:
            yield
        finally:
            serving.is_leaving = True
            leave.set()
            if serving.served is None:
                holding.cancel()  # still loading, or failed
            await asyncio.wait([holding])

    return lifespan
