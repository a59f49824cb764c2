"""Kernels for tests are written, or patched, into a directory of their own and built from there."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from phaseloop.kernels.host import Host
from phaseloop.kernels.sources import source_directory

sys.path.insert(0, str(Path(__file__).parent))

WORKERS = min(2, os.cpu_count() or 1)


@pytest.fixture(scope="session")
def host() -> Host:
    """Runs the kernels of the tree; what it has built stays loaded."""
    return Host(worker_count=WORKERS)


@pytest.fixture
def write_kernel(tmp_path: Path) -> Callable[[str], Host]:
    """-> a Host for one source, `toy`."""

    def write(text: str) -> Host:
        (tmp_path / "toy.cu").write_text('#include "common.cuh"\n' + text)
        return Host(directory=tmp_path)

    return write


@pytest.fixture
def plant(tmp_path: Path) -> Callable[[str, str, str], Host]:
    """-> a Host for the tree's sources with one text of one file replaced, wherever it stands."""

    def planted(name: str, good: str, bad: str) -> Host:
        for path in source_directory().iterdir():
            if path.is_file():
                text = path.read_text()
                if path.name == name:
                    assert good in text, f"{name} has no {good!r} to spoil"
                    text = text.replace(good, bad)
                (tmp_path / path.name).write_text(text)
        return Host(directory=tmp_path)

    return planted
