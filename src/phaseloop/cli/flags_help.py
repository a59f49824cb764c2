"""The table of flags for people: `phaseloop serve --help`, and the page docs/serve-flags.md.

`python -m phaseloop.cli.flags_help > docs/serve-flags.md` writes the page anew.
"""

import sys
from collections.abc import Iterator
from textwrap import wrap
from typing import cast

from msgspec import NODEFAULT
from msgspec.structs import fields

from .flags import Flag, Group, Status, Values
from .flags_foreign import FOREIGN
from .flags_serve import USED
from .serve_settings import Settings

WIDTH, INDENT = 100, 34
USAGE = """\
usage: phaseloop serve -m FILE|NAME [flags]
       phaseloop serve --sim ENGINE [flags]

Serves a model over HTTP, with llama-server's and OpenAI's interfaces.  Prompts and answers never
share the engine.  llama-server's other flags are taken, too: those without a meaning here cost a
warning, and what cannot be had is an error (docs/serve-flags.md lists them all).
"""
DEFAULTS = {field.name: field.default for field in fields(Settings)}


def help_text() -> str:
    lines = [USAGE]
    for group in USED:
        lines.append(f"{group.title}:")
        for flag in group.flags:
            lines += help_lines(flag)
        lines.append("")
    lines.append("  -h, --help, --version")
    return "\n".join(lines) + "\n"


def help_lines(flag: Flag) -> Iterator[str]:
    head = f"  {spelled(flag)}"
    body = wrap(about(flag), WIDTH - INDENT)
    if len(head) >= INDENT or not body:
        yield head
    else:
        yield f"{head:<{INDENT}}{body.pop(0)}"
    yield from (" " * INDENT + line for line in body)


def spelled(flag: Flag) -> str:
    value = f" {flag.kind.metavar}" if flag.kind.metavar else ""
    return ", ".join((*flag.names, *flag.off)) + value


def about(flag: Flag) -> str:
    parts = [flag.about]
    default = shown_default(flag)
    if default:
        parts.append(f"(default: {default})")
    return " ".join(filter(None, parts))


def shown_default(flag: Flag) -> str:
    """Empty where there is none, or where it is what a switch is when nobody touches it."""
    default = DEFAULTS[flag.field]
    if default is NODEFAULT or default is None or default is False or default == ():
        return ""
    if default is True:
        return "on"
    if isinstance(default, tuple):
        return " ".join(map(repr, cast(Values, default)))
    return str(default)


# --- the page -------------------------------------------------------------------------------------

PAGE = """\
# The flags of `phaseloop serve`

Spellings, variables and defaults are llama-server's (build 11434) where it has the flag.  The
command line wins over the environment; `_` in a long flag counts as `-`; `--flag=value` is taken,
too.  Unknown flags are errors that name the nearest known one.

This page is made from the table that reads the flags (`python -m phaseloop.cli.flags_help`).
"""
FOREIGN_TITLES: dict[Status, str] = {
    "ignored": "Known, without an effect: one warning",
    "refused": "Not supported: an error, exit code 2",
}


def page() -> str:
    parts = [PAGE, *(used_table(group) for group in USED)]
    parts += [foreign_table(status, title) for status, title in FOREIGN_TITLES.items()]
    return "\n".join(parts)


def used_table(group: Group) -> str:
    rows = [f"## {group.title.capitalize()}", "", "| flag | | default | variable |"]
    rows.append("|---|---|---|---|")
    for flag in group.flags:
        cells = (code(spelled(flag)), flag.about, code(shown_default(flag)), code(flag.env))
        rows.append(row(cells))
    return "\n".join(rows) + "\n"


def foreign_table(status: Status, title: str) -> str:
    rows = [f"## {title}", "", "Values in the last column ask for nothing out of the way.", ""]
    rows += ["| flag | why | variable | harmless |", "|---|---|---|---|"]
    for flag in FOREIGN:
        if flag.status == status:
            fine = " ".join(code(value) for value in flag.fine)
            rows.append(row((code(spelled(flag)), flag.about, code(flag.env), fine)))
    return "\n".join(rows) + "\n"


def row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def code(text: str) -> str:
    return f"`{text}`" if text else ""


if __name__ == "__main__":
    sys.stdout.write(page())
