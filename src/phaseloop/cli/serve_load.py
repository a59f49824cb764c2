"""Loading, in a thread of its own, so that the server answers meanwhile and can be ended."""

import asyncio
import secrets
import threading
from collections.abc import Callable
from importlib import import_module
from typing import cast

import structlog
from msgspec import Struct

from phaseloop.core.state import Limits
from phaseloop.core.vocabulary import Policy
from phaseloop.engine.protocol import Engine, SlotFiles
from phaseloop.http.adapters import Lora
from phaseloop.runtime.prefixes import PrefixIndex

from .errors import UserError
from .serve_loaded import Facts, Interrupted, Load
from .serve_settings import Settings, limited, policy_of
from .serve_sim import load as load_sim
from .serve_words import Words, words_of

SEED_BITS = 63

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class Ready(Struct, frozen=True):
    """Everything that serving needs and that takes time to make."""

    engine: Engine
    facts: Facts
    words: Words
    limits: Limits
    policy: Policy
    prefixes: PrefixIndex
    slot_files: SlotFiles | None
    loras: tuple[Lora, ...]
    seed: int  # of the run: in the trace's header, and of the ids in answers


class Loading:
    """Begin with `wait`, from the event loop; cancelling it gives the thread up."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._is_given_up = False

    async def wait(self) -> Ready:
        """Raises UserError."""
        done: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        loop = asyncio.get_running_loop()

        def tell(set_outcome: Callable[[], None]) -> None:
            if not done.done():  # else nobody waits
                set_outcome()

        def work() -> None:
            try:
                ready = self._load()
            except Interrupted:
                return
            except BaseException as error:
                failure = error
                loop.call_soon_threadsafe(tell, lambda: done.set_exception(failure))
            else:
                loop.call_soon_threadsafe(tell, lambda: done.set_result(ready))

        # A daemon: whoever interrupts the server does not wait for a file to be read.
        threading.Thread(target=work, name="loading", daemon=True).start()
        try:
            return await done
        finally:
            self._is_given_up = True

    # --- as Reporter, on the thread ---------------------------------------------------------------

    def say(self, event: str, **values: object) -> None:
        log.info(event, **values)

    def warn(self, event: str, **values: object) -> None:
        log.warning(event, **values)

    def check(self) -> None:
        if self._is_given_up:
            raise Interrupted

    def _load(self) -> Ready:
        settings = self._settings
        loaded = loader_of(settings)(settings, self)
        self.check()
        limits = limited(loaded.limits, settings, round_ms=loaded.round_ms)
        return Ready(
            engine=loaded.engine,
            facts=loaded.facts,
            words=words_of(settings, loaded.vocabulary, self),
            limits=limits,
            policy=policy_of(settings),
            prefixes=PrefixIndex(
                limits,
                loaded.engine.describe(),
                loaded.snapshots,
                similarity=settings.slot_prompt_similarity,
                positions=loaded.positions,
            ),
            slot_files=loaded.slot_files,
            loras=loaded.loras,
            seed=secrets.randbits(SEED_BITS) if settings.seed < 0 else settings.seed,
        )


def loader_of(settings: Settings) -> Load:
    """What a model needs is imported only for one, and after the socket is open."""
    if settings.sim is not None:
        return load_sim
    try:
        kind = "serve_encoder" if settings.encodes else "serve_model"
        kind = "serve_cuda" if settings.on_gpu else kind
        return cast(Load, import_module(f"phaseloop.cli.{kind}").load)
    except ModuleNotFoundError as error:
        if error.name != "ggml":
            raise
        raise UserError(
            "ggml, which computes on the CPU, is not installed: pip install 'phaseloop[cpu]'"
        ) from None
