"""Goal: what the driver says is read right, by calls as CUDA's headers declare them; or why not.

Method: a driver of our own in C, compiled for the test, whose devices have handles that are not
their indices, and of which NVML knows one.
"""

import subprocess
from pathlib import Path

import pytest

from phaseloop.kernels.contract import KernelError
from phaseloop.kernels.driver import Driver, Gpu, read_driver
from phaseloop.kernels.host_build import compiler

ABSENT = "libof-nobody.so.1"


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    built = tmp_path_factory.mktemp("driver") / "libfake.so"
    source = Path(__file__).parent / "fake_driver.c"
    subprocess.run(
        [compiler(), "-x", "c", "-shared", "-fPIC", str(source), "-o", str(built)], check=True
    )
    return str(built)


def test_devices_are_read(library):
    assert read_driver(library, library) == Driver(
        "575.57.08",
        (12, 9),
        (
            Gpu(0, "Tesla V100-SXM2-16GB", (7, 0), 16 << 30, 15 << 30, (1,)),
            Gpu(1, "NVIDIA H200", (9, 0), 140 << 30, None, ()),
        ),
    )


@pytest.mark.parametrize("how", ["absent", "no nvml"])
def test_without_nvml_only_what_is_free_is_unknown(library, monkeypatch, how):
    monkeypatch.setenv("FAKE_DRIVER", how)
    found = read_driver(library, ABSENT if how == "absent" else library)
    assert found.release is None
    assert [gpu.free_bytes for gpu in found.gpus] == [None, None]
    assert found.gpus[0].memory_bytes == 16 << 30


def test_no_devices_are_no_error(library, monkeypatch):
    monkeypatch.setenv("FAKE_DRIVER", "no devices")
    assert read_driver(library, library) == Driver("575.57.08", (12, 9), ())


def test_a_missing_driver_is_told():
    with pytest.raises(
        KernelError, match=r"libof-nobody.* install NVIDIA's driver; in a container"
    ):
        read_driver(ABSENT, ABSENT)


def test_a_broken_driver_is_told(library, monkeypatch):
    monkeypatch.setenv("FAKE_DRIVER", "broken")
    with pytest.raises(
        KernelError, match=r"cuInit: .*unsupported display driver \(803\); .*restart"
    ):
        read_driver(library, library)
