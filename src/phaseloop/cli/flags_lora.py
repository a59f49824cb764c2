"""The flags of `phaseloop serve` that load adapters, in llama-server's spellings.

All of them number adapters in the order of the command line, whatever the flag.
"""

import csv
import math

from .flags import SWITCH, Group, Kind, used

SCALE_MAX = 1e9


def files(text: str) -> tuple[tuple[str, float], ...]:
    """Names between commas; one with a comma in it stands between quotes."""
    return tuple((name, 1.0) for name in parts(text))


def scaled_files(text: str) -> tuple[tuple[str, float], ...]:
    return tuple(scaled(part) for part in parts(text))


def parts(text: str) -> list[str]:
    found = [part.strip() for row in csv.reader([text]) for part in row if part.strip()]
    if not found:
        raise ValueError("names no file")
    return found


def scaled(part: str) -> tuple[str, float]:
    name, colon, scale = part.rpartition(":")
    try:
        number = float(scale)
    except ValueError:
        number = math.nan
    if not colon or not name or not abs(number) <= SCALE_MAX:
        raise ValueError(f"{part!r} is no FNAME:SCALE")
    return name, number


LORA = Group(
    "adapters",
    (
        used(
            "--lora",
            Kind("FNAME", files),
            "lora",
            "LoRA adapters of the model, A,B: GGUF files or directories of PEFT",
            collects=True,
        ),
        used(
            "--lora-scaled",
            Kind("FNAME:SCALE", scaled_files),
            "lora",
            "as --lora, with the scale that requests get that name none (1)",
            collects=True,
        ),
        used(
            "--lora-init-without-apply",
            SWITCH,
            "lora_init_without_apply",
            "adapters have no effect until a request or POST /lora-adapters says so",
        ),
    ),
)
