"""Every deliberate fault in the core must be caught by an invariant, an expectation or a check.

Each is applied to a copy of the core, and judge.py looks at that copy in a process of its own.  A
fault that survives is a missing invariant or scenario.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from mutations import MUTATIONS, Mutation

import phaseloop.core

HERE = Path(__file__).parent
CORE = Path(phaseloop.core.__file__).parent
TIMEOUT_S = 60  # the most that a fault may hang; the judge itself needs about a second


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A package `phaseloop` with nothing but a copy of the core."""
    package = tmp_path / "phaseloop"
    shutil.copytree(CORE, package / "core", ignore=shutil.ignore_patterns("__pycache__"))
    (package / "__init__.py").touch()
    return package / "core"


def judge(core: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(core.parents[1]), str(HERE)])
    env = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, "-P", str(HERE / "judge.py")],
        env=env,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def test_the_core_as_it_is_passes(copied: Path) -> None:
    result = judge(copied)
    assert (result.returncode, result.stdout) == (0, ""), result.stdout + result.stderr


@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: one.name)
def test_fault_is_caught(
    mutation: Mutation, copied: Path, record_property: Callable[[str, object], None]
) -> None:
    path = copied / mutation.file
    text = path.read_text()
    assert text.count(mutation.old) == 1, f"{mutation.file} has changed: look at this fault again"
    path.write_text(text.replace(mutation.old, mutation.new))
    result = judge(copied)
    assert result.returncode == 1, f"nothing notices that {mutation.name}:\n{result.stderr}"
    record_property("killed_by", result.stdout.strip())
    sys.stdout.write(f"{mutation.name}: killed by {result.stdout}")


def test_the_faults_are_different() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 16
