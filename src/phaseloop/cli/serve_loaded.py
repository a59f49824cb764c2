"""What has been loaded, be it a model or a pretence, on its way into the server."""

from collections.abc import Callable
from typing import Protocol

from msgspec import Struct

from phaseloop.core.state import Limits
from phaseloop.core.vocabulary import SlotIndex
from phaseloop.engine.protocol import Engine, SlotFiles
from phaseloop.engine.reuse import Positions
from phaseloop.engine.snapshots import Snapshots
from phaseloop.http.adapters import Lora
from phaseloop.runtime.prefixes import anywhere
from phaseloop.text.vocabulary import Vocabulary

from .serve_settings import Settings


class Facts(Struct, frozen=True):
    """Of a model's file, for GET /v1/models and /props."""

    name: str
    path: str = ""
    size_bytes: int = 0
    parameter_count: int = 0
    ftype: str = ""
    architecture: str = ""
    width: int = 0
    context_trained: int = 0


class Loaded(Struct, frozen=True):
    engine: Engine
    vocabulary: Vocabulary
    facts: Facts
    round_ms: int  # the longest prompt round, unless the operator says otherwise
    snapshots: Snapshots
    limits: Limits  # the engine's half
    positions: Callable[[SlotIndex], Positions] = anywhere  # as ModelEngine.positions
    slot_files: SlotFiles | None = None
    loras: tuple[Lora, ...] = ()


class Reporter(Protocol):
    """Who is told how loading goes; called from the loading thread."""

    def say(self, event: str, **values: object) -> None: ...
    def warn(self, event: str, **values: object) -> None: ...

    def check(self) -> None:
        """Raises Interrupted if nobody waits any more."""
        ...


Load = Callable[[Settings, Reporter], Loaded]


class Interrupted(Exception):
    """Loading was given up."""
