"""Reading the pages of docs/: tables and blocks that follow a comment which names them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PACKAGE = ROOT / "src" / "phaseloop"

Row = list[str]


def after_marker(page: str, name: str) -> str:
    """What follows the comment `<!-- tests/docs: NAME -->`."""
    marker = f"<!-- tests/docs: {name} -->\n"
    assert page.count(marker) == 1, f"nothing, or more than one thing, is called {name}"
    return page.split(marker)[1]


def table(page: str, name: str) -> list[Row]:
    """The cells below the head of the table of that name."""
    lines = after_marker(page, name).split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def block(page: str, name: str) -> str:
    """What is between the fences of the block of that name."""
    found = re.match(r"```\w*\n(.*?)```\n", after_marker(page, name), re.DOTALL)
    assert found is not None, f"no fenced block follows the comment {name}"
    return found[1]


def with_block(page: str, name: str, content: str) -> str:
    """The page with another content between those fences."""
    before, rest = page.split(f"<!-- tests/docs: {name} -->\n")
    fence, _, rest = rest.partition("\n")
    return f"{before}<!-- tests/docs: {name} -->\n{fence}\n{content}{rest[rest.index('```') :]}"


def codes(rows: list[Row]) -> list[str]:
    """The first cells, which are `codes`; no cell may be empty."""
    for row in rows:
        assert re.fullmatch(r"`\w+`", row[0]), row
        assert all(row), f"an empty cell beside {row[0]}"
    return [row[0].strip("`") for row in rows]
