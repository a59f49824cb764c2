"""The server's life: Hypercorn around the application, the service within, signals, an exit code.

    bound -> loading (503) -> serving -> the first signal, or the engine's end -> closed

The service decides when it is over (R16): the first signal is an event like any other, after which
it refuses newcomers and gives those under way their grace; when it says Stop, the HTTP server gets
a moment to send what is written, and the process ends.
"""

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import structlog
from hypercorn.asyncio import serve as serve_http  # pyright: ignore[reportUnknownVariableType]
from hypercorn.config import Config

from phaseloop.http.adapters import Loras
from phaseloop.http.app import create_app
from phaseloop.http.served import HttpOptions, ModelCard, Served
from phaseloop.runtime.service import Service

from .errors import UserError
from .serve_bind import socket_path, url_of
from .serve_load import Loading, Ready
from .serve_logs import logs_of
from .serve_requests import log_began, log_ended
from .serve_settings import Settings, api_keys_of, queue_wait_ns, scales_of, template_variables
from .serve_trace import Trace

EXIT_FAULT = 70  # as for a lost engine
EXIT_INTERRUPTED = 130  # 128 + SIGINT, before there was anything to end in order
CLOSE_S = 1.0  # for answers that are written but not sent
CLOSE_ALL_S = 4.0  # for the engine's thread and the trace after that
KEEP_ALIVE_S = 5.0  # between requests, as llama-server; Hypercorn holds what hung up as long, too
HEAD_BYTES_MAX = 64 << 10  # of a request: its line and headers
PING_NEVER_S = 10**9
VOCAB_TYPES = {"llama": 1, "gpt2": 2, "bert": 3}  # llama.cpp's numbers

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


def run(settings: Settings, listener: socket.socket, warnings: Sequence[str]) -> int:
    """Serve until a signal or the engine ends it; the process's exit code.  Raises UserError."""
    logs = logs_of(settings)
    try:
        log.info("listening", url=url_of(listener, settings.api_prefix))
        for warning in warnings:
            log.warning(warning)
        if settings.trace is None:
            return serve_until_ended(settings, listener, None)
        with Trace(Path(settings.trace), settings.trace_content) as trace:
            return serve_until_ended(settings, listener, trace)
    finally:
        if (path := socket_path(settings)) is not None:
            path.unlink(missing_ok=True)
        logs.close()


def serve_until_ended(settings: Settings, listener: socket.socket, trace: Trace | None) -> int:
    server = Server(settings, listener, trace)
    asyncio.run(server.run())
    if server.failure is not None:
        raise server.failure
    return server.exit_code


class Server:
    """One run, from a bound socket to an exit code.  Belongs to the event loop's thread."""

    def __init__(self, settings: Settings, listener: socket.socket, trace: Trace | None) -> None:
        self.exit_code = 0
        self.failure: UserError | None = None  # why nothing could be served
        self._settings = settings
        self._listener = listener
        self._trace = trace
        self._options = http_options(settings)
        self._ended = asyncio.Event()
        self._service: Service | None = None
        self._signals = 0

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        app = create_app(self._options, self._open_served, on_failed=self._on_failed)
        config = config_of(self._settings, self._listener.detach())
        await serve_http(app, config, shutdown_trigger=self._ended.wait)  # pyright: ignore[reportArgumentType]

    # --- what there is to serve -------------------------------------------------------------------

    @asynccontextmanager
    async def _open_served(self) -> AsyncGenerator[Served]:
        ready = await Loading(self._settings).wait()
        recording = self._trace and self._trace.recording(ready)
        async with Service(
            ready.engine,
            ready.limits,
            ready.policy,
            recording=recording,
            prefixes=ready.prefixes,
        ) as service:
            self._service = service
            watching = asyncio.create_task(self._watch(service), name="phaseloop-end")
            log_ready(ready)
            try:
                yield served_of(self._settings, service, ready)
            finally:
                watching.cancel()

    async def _watch(self, service: Service) -> None:
        """The service's end is the server's."""
        try:
            stop = await service.ended()
        except Exception:
            log.exception("the scheduler failed", exit_code=EXIT_FAULT)
            self.exit_code = EXIT_FAULT
        else:
            self.exit_code = stop.exit_code
            tell = log.info if stop.exit_code == 0 else log.error
            tell("stopped", reason=stop.reason, exit_code=stop.exit_code)
        self._ended.set()

    def _on_failed(self, error: BaseException) -> None:
        if isinstance(error, UserError):
            self.failure = error
        else:
            log.error("loading failed", exc_info=error)
            self.exit_code = EXIT_FAULT
        self._ended.set()

    # --- signals ----------------------------------------------------------------------------------

    def _on_signal(self, number: signal.Signals) -> None:
        self._signals += 1
        if self._service is not None and self._signals <= 2:
            grace = "with a grace for answers under way" if self._signals == 1 else "at once"
            log.info("shutting down", signal=number.name, how=grace)
            self._service.shut_down()
        elif self._signals <= 2:
            log.info("given up while loading", signal=number.name)
            self.exit_code = EXIT_INTERRUPTED if number == signal.SIGINT else 0
            self._ended.set()
        else:  # something hangs
            os._exit(EXIT_INTERRUPTED)


# --- what the settings make -----------------------------------------------------------------------


def http_options(settings: Settings) -> HttpOptions:
    """Raises UserError."""
    interval = settings.sse_ping_interval
    return HttpOptions(
        api_keys=api_keys_of(settings),
        cors_origins=settings.cors_origins,
        prefix=settings.api_prefix,
        metrics=settings.metrics,
        slots=settings.show_slots,
        props=settings.props,
        phase_control=settings.phase_control,
        ping_interval_s=interval if interval > 0 else PING_NEVER_S,
    )


def config_of(settings: Settings, listener: int) -> Config:
    """Hypercorn's; its timeouts are long, as answers and those who read them may be slow."""
    config = Config()
    config.bind = [f"fd://{listener}"]
    config.errorlog = logging.getLogger("hypercorn.error")
    config.keep_alive_timeout = KEEP_ALIVE_S
    config.keep_alive_max_requests = 10**9
    config.read_timeout = settings.timeout
    config.graceful_timeout = CLOSE_S
    config.shutdown_timeout = CLOSE_ALL_S
    config.h11_max_incomplete_size = HEAD_BYTES_MAX
    config.include_server_header = False
    return config


def served_of(settings: Settings, service: Service, ready: Ready) -> Served:
    return Served(
        service=service,
        tokenizer=ready.words.tokenizer,
        model=card_of(settings, ready),
        template=ready.words.template,
        defaults=ready.words.defaults,
        default_limit=None if settings.predict < 0 else settings.predict,
        began=log_began,
        ended=log_ended,
        created=int(time.time()),
        id_seed=ready.seed,
        default_seed=None if settings.seed < 0 else settings.seed,
        breaker_texts=ready.words.breaker_texts,
        cache_prompt=settings.cache_prompt,
        queue_wait_ns_max=queue_wait_ns(settings),
        embd_normalize=settings.embd_normalize,
        context_shift=settings.context_shift and service.description.can_shift,
        prefills=settings.prefill_assistant,
        reasoning_format="none" if settings.reasoning_format == "none" else "auto",
        template_variables=template_variables(settings),
        slot_files=ready.slot_files,
        loras=Loras(ready.loras, scales_of(settings)),
    )


def card_of(settings: Settings, ready: Ready) -> ModelCard:
    facts, vocabulary = ready.facts, ready.words.tokenizer.vocabulary
    return ModelCard(
        aliases=settings.alias or (settings.hf_repo or facts.name,),
        path=facts.path,
        size=facts.size_bytes,
        ftype=facts.ftype,
        architecture=facts.architecture,
        vocab_type=VOCAB_TYPES[vocabulary.model],
        n_vocab=len(vocabulary.tokens),
        n_ctx=ready.limits.context_length,
        n_ctx_train=facts.context_trained,
        n_embd=facts.width,
        n_params=facts.parameter_count,
        tags=settings.tags,
    )


def log_ready(ready: Ready) -> None:
    limits, description = ready.limits, ready.engine.describe()
    log.info(
        "ready",
        model=ready.facts.name,
        policy=ready.policy.name,
        engine=description.name,
        slots=limits.slot_count,
        context=limits.context_length,
        kv_tokens=limits.page_count * limits.page_length,
        bits="may vary" if description.unstable else "equal in any company",
    )
    if description.unstable:
        causes = ", ".join(description.unstable)
        log.warning("the bits of an answer may depend on its company", because=causes)
