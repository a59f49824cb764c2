"""The adapters that are loaded, and which of them a request gets at what scale.

On the wire a list is `[{"id": 0, "scale": 0.5}, ...]`; an adapter that is not in it has scale 0.
As in llama-server, a request that names none, also by an empty list, gets what holds for all.
"""

from collections.abc import Sequence
from typing import Any, cast

from msgspec import Struct

from phaseloop.engine.settings import Adapters

from .errors import invalid_field
from .request_fields import Fields, Json, real, whole, wrong


class Lora(Struct, frozen=True):
    """What is told of an adapter; names as llama-server has them on the wire."""

    path: str
    task_name: str = ""
    prompt_prefix: str = ""


class Loras:
    """By id.  `default` is changed by the event loop's thread alone, and read by any."""

    def __init__(self, known: Sequence[Lora] = (), scales: Sequence[float] = ()) -> None:
        self._known = tuple(known)
        self._scales = tuple(scales)

    def __len__(self) -> int:
        return len(self._known)

    @property
    def default(self) -> Adapters:
        """What a request gets that names none."""
        return active(dict(enumerate(self._scales)))

    def set_default(self, place: str, entries: object) -> None:
        """Raises ApiError.  Requests that have arrived keep what they got."""
        scales = self.scales_of(place, entries)
        self._scales = tuple(scales.get(number, 0.0) for number in range(len(self)))

    def scales_of(self, place: str, entries: object) -> dict[int, float]:
        """A list as it comes over the wire.  Raises ApiError, which names the entry."""
        if not isinstance(entries, list):
            raise wrong(place or "body", "a list of objects with id and scale", entries)
        found: dict[int, float] = {}
        for index, entry in enumerate(cast(list[object], entries)):
            here = f"{place}[{index}]"
            if not isinstance(entry, dict):
                raise wrong(here, "an object with id and scale", entry)
            number, scale = self._entry(here, cast(dict[str, Any], entry))
            if number in found:
                raise invalid_field(f"{here}.id", f"{number} is in the list twice")
            found[number] = scale
        return found

    def as_json(self) -> list[Json]:
        return [
            {
                "id": number,
                "path": lora.path,
                "scale": scale,
                "task_name": lora.task_name,
                "prompt_prefix": lora.prompt_prefix,
            }
            for number, (lora, scale) in enumerate(zip(self._known, self._scales, strict=True))
        ]

    def _entry(self, place: str, entry: dict[str, Any]) -> tuple[int, float]:
        for name in ("id", "scale"):
            if entry.get(name) is None:
                raise invalid_field(f"{place}.{name}", "missing")
        number = whole(f"{place}.id", entry["id"])
        if not 0 <= number < len(self):
            known = f"there are {len(self)}" if len(self) else "none is loaded, see --lora"
            raise invalid_field(f"{place}.id", f"there is no such adapter; {known}")
        return number, real(f"{place}.scale", entry["scale"])


def adapters_of(fields: Fields, loras: Loras) -> Adapters:
    """Those of a request.  Raises ApiError."""
    place, entries = fields.found("lora")
    if entries is None or entries == []:
        return loras.default
    return active(loras.scales_of(place, entries))


def active(scales: dict[int, float]) -> Adapters:
    return tuple((number, scales[number]) for number in sorted(scales) if scales[number] != 0)


def shown(adapters: Adapters) -> list[Json]:
    """As it would come over the wire."""
    return [{"id": number, "scale": scale} for number, scale in adapters]
