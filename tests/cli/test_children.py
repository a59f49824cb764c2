"""Goal: no process of ours takes a file of the directory it is started in for one of Python's.

Method: commands that start others, in a directory with a `types.py` that ends whoever imports it.
"""

import asyncio
import subprocess
from pathlib import Path

import pytest

from phaseloop.cli import PHASELOOP
from phaseloop.cli.child import ChildServer
from phaseloop.cli.client import Exchange


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in which a module of Python's is shadowed, and we are in it."""
    (tmp_path / "types.py").write_text("raise SystemExit('imported from the working directory')")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("trap")
@pytest.mark.parametrize("further", [(), ("--supervise",)], ids=["server", "supervisor"])
def test_a_server_of_ours(further: tuple[str, ...]):
    async def main() -> int:
        async with (
            ChildServer(("--sim", "v100x4-qwen27b", *further)) as server,
            Exchange(server.address, "GET", "/health") as answer,
        ):
            return answer.status

    assert asyncio.run(main()) == 200


def test_the_jobs_of_a_check(trap: Path):
    command = (*PHASELOOP, "check", "--slots", "1", "--requests", "1", "--jobs", "2")
    ran = subprocess.run(command, cwd=trap, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
