"""Kernels for tests are written, or patched, into a directory of their own and built from there.

With `--phaseloop-device cuda` the tests that perform launches do so on a GPU; `double` takes the
same way over a double of CuPy, so that the way itself is tested.
"""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from phaseloop.kernels import cupy_device
from phaseloop.kernels.host import Host
from phaseloop.kernels.sources import source_directory

sys.path.insert(0, str(Path(__file__).parent))

from cupy_double import Machine, fake_cubin
from gpu_host import GpuHost

WORKERS = min(2, os.cpu_count() or 1)
DEVICES = ("host", "cuda", "double")
PLANTED = "faults are planted on the shim, which notices them before they do harm"
NO_DEVICE = "performs nothing on a device; `make test` runs it"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--phaseloop-device", choices=DEVICES, default="host")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On a device, what only the shim can check is skipped, and says why."""
    if config.getoption("--phaseloop-device", "host") == "host":
        return
    for item in items:
        names = getattr(item, "fixturenames", ())
        if {"plant", "write_kernel"} & set(names):
            item.add_marker(pytest.mark.skip(reason=PLANTED))
        elif "host" not in names:
            item.add_marker(pytest.mark.skip(reason=NO_DEVICE))


@pytest.fixture(scope="session")
def host(request: pytest.FixtureRequest) -> Iterator[Host | GpuHost]:
    """Runs the kernels of the tree; what it has built stays loaded."""
    where = request.config.getoption("--phaseloop-device", "host")
    if where == "host":
        yield Host(worker_count=WORKERS)
        return
    lent = request.config.pluginmanager.get_plugin("phaseloop-device")  # of `make gpu-check`
    if lent is not None:
        yield GpuHost(lent.device)
        return
    with pytest.MonkeyPatch.context() as patch:
        if where == "double":
            patch.setattr(cupy_device, "cubin", fake_cubin)
        cupy = Machine() if where == "double" else cupy_device.load_cupy()
        device = cupy_device.CupyDevice(cupy, 0)
        yield GpuHost(device)
        device.close()


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
