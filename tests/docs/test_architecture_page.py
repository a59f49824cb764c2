"""Goal: docs/architecture.md draws the layers and the hand-overs as they are.

Method: its tables are compared with the import rules, the directories and COMPLETIONS.
"""

import re
from typing import get_args

import pytest
from pages import DOCS, PACKAGE, ROOT, table

from phaseloop.core import state
from phaseloop.core.vocabulary import COMPLETIONS, AnyEffect, AnyEvent

PAGE = (DOCS / "architecture.md").read_text()
LAYERS = table(PAGE, "layers")


def names(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


def test_layers_import_what_the_tidy_test_allows():
    source = (ROOT / "tests" / "test_tidy.py").read_text()
    rules = source.split("MAY_IMPORT: ")[1].split("\n}\n")[0]
    allowed = {
        name: set(re.findall(r'"(\w+)"', below))
        for name, below in re.findall(r'"(\w+)": (set\(\)|\{.*?\})', rules)
    }
    documented = {names(row[0])[0]: set(names(row[1])) for row in LAYERS if row[1] != "all"}
    assert documented == allowed


@pytest.mark.parametrize("row", LAYERS, ids=lambda row: row[0])
def test_the_page_says_which_layers_exist(row):
    layer = PACKAGE / names(row[0])[0]
    exists = any(path.name != "__init__.py" for path in layer.glob("*.py"))
    stands = row[3].split(",")[0].split(";")[0]
    if exists:
        assert stands != "comes next", f"say in docs/architecture.md how {row[0]} stands"
    else:
        assert stands in ("comes next", "begun")


def test_every_layer_is_in_the_table():
    documented = {names(row[0])[0] for row in LAYERS}
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} <= documented


def test_every_file_of_the_core_has_its_question():
    files = {f"core/{path.name}" for path in (PACKAGE / "core").glob("*.py")}
    section = PAGE.split("Inside `core`")[1].split("\n## ")[0]
    assert set(re.findall(r"`(core/\w+\.py)`", section)) == files - {"core/__init__.py"}


def test_every_effect_has_its_completions():
    rows = table(PAGE, "completions")
    documented = {names(row[0])[0]: names(row[2]) for row in rows}
    answers = {effect.__name__: [e.__name__ for e in COMPLETIONS[effect]] for effect in COMPLETIONS}
    assert documented == {
        effect.__name__: answers.get(effect.__name__, []) for effect in get_args(AnyEffect)
    }


def test_the_sequence_diagram_speaks_of_events_and_effects():
    diagram = PAGE.split("```mermaid")[1].split("```")[0]
    known = {record.__name__ for record in (*get_args(AnyEvent), *get_args(AnyEffect))}
    spoken = set(re.findall(r"\b[A-Z][a-z]+[A-Z]\w+", diagram))
    assert spoken and spoken <= known


def test_the_picture_shows_every_role():
    picture = (DOCS / "images" / "roles.svg").read_text()
    drawn = set(re.findall(r'<text x="\d+" y="\d+">(\w+)</text>', picture))
    roles = set(get_args(state.Role))
    assert roles - drawn <= set(re.findall(r"`(\w+)`", PAGE)), "drawn, or named below the picture"


@pytest.mark.parametrize("row", table(PAGE, "proofs"), ids=lambda row: row[0])
def test_every_way_to_run_names_what_exists(row):
    for path in re.findall(r"tests/[\w/.]+", row[2]):
        assert (ROOT / path).exists(), path
