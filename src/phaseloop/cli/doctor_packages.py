"""Which packages are here, beside the versions that phaseloop was tested with."""

import re
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, metadata, requires, version

from msgspec import Struct

REQUIREMENT = re.compile(r"([\w.-]+)(?:\[[\w,-]+\])?\s*([^;]*)(?:;.*extra == ['\"](\w+)['\"])?")
BOUND = re.compile(r"(>=|<|==)([\d.]+)")
SHOWN = (None, "cpu", "cuda", "hub")  # extras; what developers use is their own affair
Finder = Callable[[str], str]


class Package(Struct, frozen=True):
    name: str
    bounds: str  # as pyproject.toml has them
    extra: str | None  # None: always needed
    found: str | None
    fault: str | None  # "missing", "too old", "newer than tested"; None where all is well


class Python(Struct, frozen=True):
    version: str
    bounds: str
    is_good: bool


def python_of(running: str, project: str = "phaseloop") -> Python:
    bounds = metadata(project)["Requires-Python"]
    return Python(running, bounds, fault_of(running, bounds) is None)


def packages(
    requirements: Sequence[str] | None = None, find: Finder = version
) -> Iterator[Package]:
    """Of phaseloop itself, if no requirements are given; extras' own only where they are here."""
    for text in requires("phaseloop") or () if requirements is None else requirements:
        match = REQUIREMENT.fullmatch(text)
        if match is None or match[3] not in SHOWN:
            continue
        name, bounds, extra = match[1], match[2].strip(), match[3]
        try:
            found = find(name)
        except PackageNotFoundError:
            fault = "missing" if extra in (None, "cpu") else None  # without ggml there is no engine
            yield Package(name, bounds, extra, None, fault)
        else:
            yield Package(name, bounds, extra, found, fault_of(found, bounds))


def fault_of(found: str, bounds: str) -> str | None:
    """Bounds are as the project writes them: `>=4.16`, `<5`, `==0.0.45`."""
    have = numbers(found)
    for relation, limit in BOUND.findall(bounds):
        wanted = numbers(limit)
        if have < wanted and relation != "<":
            return "too old"
        if (relation == "<" and have >= wanted) or (relation == "==" and have > wanted):
            return "newer than tested"
    return None


def numbers(text: str) -> tuple[int, ...]:
    """Of a release, without zeros at its end: 2.4.0rc1 -> (2, 4)."""
    match = re.match(r"\d+(\.\d+)*", text)
    parts = [int(part) for part in match[0].split(".")] if match else []
    while parts and parts[-1] == 0:
        parts.pop()
    return tuple(parts)
