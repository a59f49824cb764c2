"""A scenario as a pytest test that can be pasted into a file of its own."""

from collections.abc import Iterator
from typing import cast

import msgspec
from msgspec import NODEFAULT, Struct

from phaseloop.engine.sim_cost import Cost

from .replay_scenario import Scenario

WIDTH = 96


def snippet(scenario: Scenario, cost: Cost, predicate: str, source: str) -> str:
    """Fails for as long as the run shows what `predicate` says."""
    names = sorted(set(type_names(scenario)) | set(type_names(cost)))
    imports: dict[str, list[str]] = {}
    for module, name in names:
        imports.setdefault(module, []).append(name)
    imports.setdefault("phaseloop.sim.replay_figures", []).append("figures_of")
    imports.setdefault("phaseloop.sim.replay_predicate", []).append("parse_predicate")
    imports.setdefault("phaseloop.sim.replay_whatif", []).append("summary_of")
    lines = [f'"""Shrunk by phaseloop replay from {source}."""', ""]
    lines += [f"from {name} import {', '.join(sorted(imports[name]))}" for name in sorted(imports)]
    lines += ["", f"SCENARIO = {literal(scenario)}", f"COST = {literal(cost)}", "", ""]
    lines += [
        "def test_shrunk():",
        "    figures = figures_of(summary_of(SCENARIO, COST))",
        f"    predicate = parse_predicate({literal(predicate)}, tuple(figures))",
        "    assert not predicate(figures), figures",
    ]
    return "\n".join(lines) + "\n"


def type_names(value: object) -> Iterator[tuple[str, str]]:
    """(module, name) of every struct in the value."""
    if isinstance(value, Struct):
        yield type(value).__module__, type(value).__name__
        for name, part in fields_shown(value):
            del name
            yield from type_names(part)
    elif isinstance(value, tuple):
        for part in cast(tuple[object, ...], value):
            yield from type_names(part)


def fields_shown(value: Struct) -> Iterator[tuple[str, object]]:
    """Fields that do not stand at their default."""
    values = msgspec.structs.asdict(value)
    for field in msgspec.structs.fields(value):
        if field.default is NODEFAULT or values[field.name] != field.default:
            yield field.name, values[field.name]


def literal(value: object, indent: int = 0) -> str:
    """Python source of the value, a line per field where one line is too short."""
    if isinstance(value, Struct):
        name = type(value).__name__
        parts = [f"{field}={literal(part, indent + 4)}" for field, part in fields_shown(value)]
        return bracketed(f"{name}(", parts, ")", indent)
    if isinstance(value, tuple):
        items = cast(tuple[object, ...], value)
        parts = [literal(part, indent + 4) for part in items]
        closing = ",)" if len(parts) == 1 else ")"
        if all(isinstance(item, int) for item in items):
            parts = filled(parts, WIDTH - indent - 4)
        return bracketed("(", parts, closing, indent)
    if isinstance(value, str):
        return msgspec.json.encode(value).decode()  # a Python literal as well, in double quotes
    return repr(value)


def filled(parts: list[str], width: int) -> list[str]:
    """Neighbours joined for as long as they fit on a line."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + len(part) + 3 <= width:
            lines[-1] += f", {part}"
        else:
            lines.append(part)
    return lines


def bracketed(opening: str, parts: list[str], closing: str, indent: int) -> str:
    line = opening + ", ".join(parts) + closing
    if len(line) + indent <= WIDTH and "\n" not in line:
        return line
    pad = " " * (indent + 4)
    body = "".join(f"{pad}{part},\n" for part in parts)
    return f"{opening}\n{body}{' ' * indent})"
