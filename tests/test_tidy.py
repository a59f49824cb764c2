"""Goal: the rules of the house that no linter knows hold for every file, or a test names the file.

Method: the syntax trees of all sources under src/, and the files that git would commit.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, get_args

import pytest

from phaseloop.core import vocabulary

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "phaseloop"
SOURCES = sorted(PACKAGE.rglob("*.py"))
CHECKED = [
    *SOURCES,
    *sorted((ROOT / "tests").rglob("*.py")),
    *sorted((ROOT / "benchmarks").rglob("*.py")),
]

MAY_IMPORT: dict[str, set[str]] = {  # layer -> layers below it that it may use (design: layers)
    "core": set(),
    "kernels": set(),
    "text": set(),
    "ops": {"kernels"},
    "model": {"ops"},
    "engine": {"core", "model", "ops"},
    "runtime": {"core", "engine", "text"},
    "http": {"core", "engine", "runtime", "text"},
    "sim": {"core", "runtime", "engine"},
}
CORE_MAY_USE = ("collections.abc", "immutables", "msgspec", "phaseloop.core", "typing")
FUNCTION_LINES_MAX = 60
FILE_LINES_MAX = 400
FILE_BYTES_MAX = 1 << 20
LAZY = {
    Path("cli/main.py"),  # loads the command that was asked for, and no other
    Path("cli/serve.py"),  # binds its socket before it loads what serves
    Path("cli/serve_load.py"),  # loads the engine, where there is a model
    Path("kernels/cupy_device.py"),  # loads NVRTC before CuPy, which is an extra, looks for one
    Path("cli/replay.py"),  # loads the engine, which is an extra, if that was asked for
}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imported(path: Path) -> Iterator[str]:
    """Every module that a file of the package imports, by its absolute name."""
    package = ["phaseloop", *path.relative_to(PACKAGE).parent.parts]
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


# --- layers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_go_downwards(path):
    layer = path.relative_to(PACKAGE).parts[0]
    if layer not in MAY_IMPORT:
        assert layer in ("cli", "__init__.py", "__main__.py"), f"{layer} is no layer of the design"
        return
    allowed = {"phaseloop", f"phaseloop.{layer}", "phaseloop.__version__"}
    allowed |= {f"phaseloop.{below}" for below in MAY_IMPORT[layer]}
    for module in imported(path):
        if module.split(".")[0] == "phaseloop":
            prefix = ".".join(module.split(".")[:2])
            assert prefix in allowed, f"{layer} may not import {module}"


@pytest.mark.parametrize("path", sorted((PACKAGE / "http").glob("*.py")), ids=name_of)
def test_http_knows_engines_by_their_protocol_alone(path):
    for module in imported(path):
        if module.startswith("phaseloop.engine."):
            assert module.split(".")[2] in ("protocol", "settings"), module


@pytest.mark.parametrize("path", sorted((PACKAGE / "core").glob("*.py")), ids=name_of)
def test_the_core_is_pure(path):
    for module in imported(path):
        assert any(f"{module}.".startswith(f"{name}.") for name in CORE_MAY_USE), module


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_cupy_stays_at_the_device_boundary(path):
    if path.relative_to(PACKAGE).parts[0] not in ("kernels", "ops"):
        assert not [module for module in imported(path) if module.split(".")[0] == "cupy"]


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_stand_at_the_top(path):
    """A module that must import later is in the wrong layer."""
    for function in functions(path):
        for node in ast.walk(function):
            assert not isinstance(node, ast.Import | ast.ImportFrom), (
                f"{function.name} imports in line {node.lineno}"
            )
    loads = [node for node in ast.walk(tree_of(path)) if is_lazy_load(node)]
    if path.relative_to(PACKAGE) in LAZY:
        assert len(loads) == 1
    else:
        assert not loads


def is_lazy_load(node: ast.AST) -> bool:
    called = node.func if isinstance(node, ast.Call) else None
    if isinstance(called, ast.Attribute):
        return called.attr == "import_module"
    return isinstance(called, ast.Name) and called.id in ("import_module", "__import__")


# --- size and order -------------------------------------------------------------------------------


@pytest.mark.parametrize("path", CHECKED, ids=name_of)
def test_functions_fit_on_a_screen(path):
    for function in functions(path):
        assert function.end_lineno is not None
        lines = function.end_lineno - function.lineno + 1
        assert lines < FUNCTION_LINES_MAX, f"{function.name} has {lines} lines"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_files_can_be_read_in_one_sitting(path):
    lines = len(path.read_text().splitlines())
    assert lines <= FILE_LINES_MAX, f"{lines} lines"


@pytest.mark.parametrize("path", CHECKED, ids=name_of)
def test_files_say_what_they_are_for(path):
    if path.read_text().strip():
        assert ast.get_docstring(tree_of(path)), "the first sentence is missing"


# --- the vocabulary -------------------------------------------------------------------------------


def members(union: UnionType) -> list[type]:
    return list(get_args(union))


def test_the_unions_hold_every_event_and_effect():
    assert set(members(vocabulary.AnyEvent)) == set(vocabulary.Event.__subclasses__())
    assert set(members(vocabulary.AnyEffect)) == set(vocabulary.Effect.__subclasses__())


def matched(path: Path, function_name: str) -> set[str]:
    """The class names that a function's match statement has a case for."""
    (function,) = (f for f in functions(path) if f.name == function_name)
    return {
        node.cls.id
        for node in ast.walk(function)
        if isinstance(node, ast.MatchClass) and isinstance(node.cls, ast.Name)
    }


def test_the_reducer_handles_every_event():
    events = {event.__name__ for event in members(vocabulary.AnyEvent)}
    assert matched(PACKAGE / "core" / "reduce.py", "on_event") == events


def test_the_shell_performs_every_effect():
    effects = {effect.__name__ for effect in members(vocabulary.AnyEffect)}
    assert matched(PACKAGE / "runtime" / "perform.py", "__call__") == effects


def test_the_explorer_knows_every_event():
    sources = "".join(path.read_text() for path in (PACKAGE / "sim").glob("e[nx]*.py"))
    for event in members(vocabulary.AnyEvent):
        assert re.search(rf"\b{event.__name__}\(", sources), f"{event.__name__} is never explored"


def test_every_effect_that_takes_time_names_its_completions():
    """Those whose docstring speaks of an answer are in the table, with the events it names."""
    for effect in members(vocabulary.AnyEffect):
        doc = effect.__doc__ or ""
        answered = re.search(r"[Cc]ompleted by|answer with", doc) is not None
        assert answered == (effect in vocabulary.COMPLETIONS), effect.__name__
    for effect, completions in vocabulary.COMPLETIONS.items():
        named = set(re.findall(r"\b[A-Z]\w+[a-z]\w+\b", effect.__doc__ or ""))
        events = {event.__name__ for event in members(vocabulary.AnyEvent)}
        assert named & events <= {event.__name__ for event in completions}
        assert vocabulary.EngineLost in completions, "a lost engine ends all waiting"


# --- the repository -------------------------------------------------------------------------------


def committed() -> list[Path]:
    """What is in git's index, or would be."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    paths = (ROOT / name for name in listed.stdout.split("\0") if name)
    return [path for path in paths if path.is_file()]


def test_no_file_is_large():
    for path in committed():
        assert path.stat().st_size <= FILE_BYTES_MAX, f"{name_of(path)} is over 1 MiB"


# Spelled in pieces, so that this file does not find itself.
MACHINE_PATHS = re.compile(rb"(/ho" rb"me/|/ro" rb"ot/|/wo" rb"rk/|/tm" rb"p/|/Us" rb"ers/)\w")


def test_no_file_names_a_place_on_somebodys_machine():
    for path in committed():
        for number, line in enumerate(path.read_bytes().splitlines(), start=1):
            assert not MACHINE_PATHS.search(line), f"{name_of(path)}, line {number}"


DISTRIBUTIONS = {  # import name -> where it differs
    "cupy": "cupy-cuda12x",
    "ggml": "ggml-python",
    "prometheus_client": "prometheus-client",
}
EXTRAS_OF_LAYERS = {"ops": {"cpu", "cuda"}, "kernels": {"cuda"}, "cli": {"hub", "plot", "ray"}}


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def distribution(entry: str) -> str:
    return re.split(r"[^\w.-]", entry)[0]


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_whatever_is_imported_is_declared(path):
    """In the core dependencies, or in an extra that only some layers may use."""
    layer, declared = path.relative_to(PACKAGE).parts[0], project()
    usable = list(declared["dependencies"])
    for extra in EXTRAS_OF_LAYERS.get(layer, ()):
        usable += declared["optional-dependencies"][extra]
    allowed = {distribution(entry) for entry in usable}
    for module in imported(path):
        top = module.split(".")[0]
        if top not in sys.stdlib_module_names and top != "phaseloop":
            assert DISTRIBUTIONS.get(top, top) in allowed, f"{module} is not a dependency"


def test_the_extras_are_those_of_the_design():
    assert set(project()["optional-dependencies"]) == {"cpu", "cuda", "hub", "plot", "ray", "dev"}


def test_every_dependency_is_bounded_and_has_its_reason():
    declared = project()
    reasons = (ROOT / "docs" / "dependencies.md").read_text()
    extras = declared["optional-dependencies"].values()
    for entry in [*declared["dependencies"], *(entry for extra in extras for entry in extra)]:
        assert re.search(r">=[\d.]+,<[\d.]+$|==[\d.]+$", entry), f"{entry} has no bounds"
        name = re.escape(distribution(entry))
        assert re.search(rf"^\| `{name}`", reasons, re.MULTILINE), f"{entry}: why?"
