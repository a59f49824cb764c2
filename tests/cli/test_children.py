"""Goal: processes we start come up, wherever we are and however little they shall log.

Method: commands that start others, also in a directory with a `types.py` that ends whoever imports
it, which no process of ours may take for Python's.
"""

import asyncio
import subprocess
from pathlib import Path

import pytest

from phaseloop.cli import PHASELOOP
from phaseloop.cli.child import ChildServer
from phaseloop.cli.client import Exchange
from phaseloop.cli.errors import UserError


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in which a module of Python's is shadowed, and we are in it."""
    (tmp_path / "types.py").write_text("raise SystemExit('imported from the working directory')")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def health(*further: str) -> int:
    """Of a server of ours with these arguments."""

    async def main() -> int:
        async with (
            ChildServer(("--sim", "v100x4-qwen27b", *further)) as server,
            Exchange(server.address, "GET", "/health") as answer,
        ):
            return answer.status

    return asyncio.run(main())


@pytest.mark.usefixtures("trap")
@pytest.mark.parametrize("further", [(), ("--supervise",)], ids=["server", "supervisor"])
def test_a_server_of_ours(further: tuple[str, ...]):
    assert health(*further) == 200


@pytest.mark.parametrize("quiet", [("-lv", "1"), ("--log-format", "json", "-lv", "2")])
def test_a_server_that_shall_log_little(quiet: tuple[str, ...]):
    assert health(*quiet) == 200


def test_a_server_that_shall_log_nothing():
    with pytest.raises(UserError, match="leave it out"):
        health("--log-disable")


def test_the_jobs_of_a_check(trap: Path):
    command = (*PHASELOOP, "check", "--slots", "1", "--requests", "1", "--jobs", "2")
    ran = subprocess.run(command, cwd=trap, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
