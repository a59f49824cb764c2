"""Goal: every file, function, link and command that the pages name exists.

Method: names are found by their form, `file.py:function` in backticks, and looked up in the
syntax trees; links are followed, anchors compared with headings.
"""

import ast
import re
from argparse import ArgumentParser
from pathlib import Path

import pytest
from pages import DOCS, PACKAGE, ROOT

from phaseloop.cli import flags_help
from phaseloop.cli.bench import SUBJECTS
from phaseloop.cli.main import COMMANDS, READS_ITS_LINE, load

PAGES = [*sorted(DOCS.glob("*.md")), ROOT / "README.md"]
OTHERS = {"--help", "--version", "--rewrite", "--only", "--no-cont-batching"}  # not of a command


def defined(path: Path) -> set[str]:
    """What a source file defines at its top level."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Assign():
                names |= {t.id for t in node.targets if isinstance(t, ast.Name)}
            case ast.AnnAssign(target=ast.Name() as target):
                names.add(target.id)
            case _:
                pass
    return names


def named(page: Path) -> list[tuple[str, str | None]]:
    """`core/policy.py:enter` and `fixtures/workloads/pair.toml`: (path, name in it or None)."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    found = re.findall(r"`([\w.*/-]+/[\w.*-]+\.(?:py|md|toml|txt|jsonl|svg))(?::(\w+))?`", text)
    return [(path, name or None) for path, name in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_and_function_named_exists(page):
    for path, name in named(page):
        places = [place for base in (PACKAGE, ROOT) for place in base.glob(path)]
        assert places, f"{page.name} names {path}, which does not exist"
        if name is not None:
            assert name in defined(places[0]), f"{page.name} names {path}:{name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        place = page.parent / path if path else page
        assert place.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(place), f"{page.name} links to {target}"


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    heads: list[str] = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def options() -> set[str]:
    """Of all commands."""
    found = set(re.findall(r"--[\w.-]+", flags_help.page()))
    subjects = {f"bench_{subject}" for subject in SUBJECTS}
    for name in (COMMANDS.keys() - set(READS_ITS_LINE)) | subjects:
        parser = ArgumentParser(add_help=False)
        load(name).add_arguments(parser)
        found |= set(re.findall(r"--[\w-]+", parser.format_help()))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_option_named_exists(page):
    named = set(re.findall(r"(?<![\w-])--[a-z][\w.-]+(?<!\.)", page.read_text()))
    assert named - OTHERS <= options()
