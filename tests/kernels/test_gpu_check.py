"""Goal: `make gpu-check` ends with 0, 1 or 2 as it should, and its figures are what was measured.

Method: the whole of it in a process of its own, over a double of CuPy on which whatever is queued
takes a millisecond, so that every figure is known; with a fault in each place.  And as it stands,
on a machine without a driver.
"""

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from phaseloop.kernels.contract import KernelError
from phaseloop.kernels.driver import read_driver

HERE = Path(__file__).parent
SCRIPT = HERE.parent.parent / "benchmarks" / "gpu_check.py"


def checked(tmp_path, fault, seconds=60):
    """-> exit code, text, JSON."""
    target = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, str(HERE / "gpu_check_double.py"), fault, str(target), str(seconds)],
        capture_output=True,
        text=True,
        check=False,
    )
    report = msgspec.json.decode(target.read_bytes()) if target.exists() else None
    return done.returncode, done.stdout + done.stderr, report


def told(report):
    return {check["name"]: check["is_good"] for check in report["checks"]}


def test_all_is_right(tmp_path):
    code, text, report = checked(tmp_path, "none")
    assert code == 0, text
    assert set(told(report).values()) == {True}
    assert report["parity"]["passed"] == 20
    assert report["ceilings"]["copy_bytes_s"] == pytest.approx(2 * 2**20 / 1e-3)
    assert report["ceilings"]["gemm_flops"] == pytest.approx(2 * 64**3 / 1e-3)
    first, second, large = report["kernels"]
    moved = 2 * 4096 + 4096 + 4096 + 2048  # x is read and written, delta, weight; y_half
    assert first["bytes_s"] == pytest.approx(moved / 1e-3)
    assert first["median_us"] == pytest.approx(1000)
    assert second["flops"] == pytest.approx(7 * 1024 / 1e-3)
    assert re.fullmatch(r"wants 805371904 bytes, \d+ are free", large["note"])
    assert large["bytes_s"] == 0
    assert "all is right" in text
    assert "(within the L2 cache)" in text


@pytest.mark.parametrize(
    ("fault", "failing", "words"),
    [
        ("wrong bits", {"parity", "engine"}, "20 failed, 0 skipped, 7 not run: too many fail"),
        ("wrong graph", {"graphs", "engine"}, "a replayed graph has other bits than its launch"),
        ("wrong copies", {"peers"}, "copies from device 0 to 1 arrive changed"),
    ],
)
def test_a_fault_fails_the_check(tmp_path, fault, failing, words):
    code, text, report = checked(tmp_path, fault)
    assert code == 1
    assert {name for name, is_good in told(report).items() if not is_good} == failing
    assert words in text
    assert "something is wrong" in text


def test_corrupting_peers_are_told_and_not_used(tmp_path):
    code, text, _ = checked(tmp_path, "corrupt peers")
    assert code == 0
    assert "0 to 1 corrupt: 1 of 4194304 bytes arrive changed" in text


def test_without_cublas_there_is_no_gemm_ceiling(tmp_path):
    code, text, report = checked(tmp_path, "no cublas")
    assert code == 0
    assert report["ceilings"]["gemm_flops"] is None
    assert "libcublas.so was not found; pip install" in text


def test_time_that_is_up_is_no_success(tmp_path):
    code, text, report = checked(tmp_path, "none", seconds=0)
    assert code == 1
    assert "26 not run: --seconds gives more time" in text
    assert {one["note"] for one in report["kernels"]} == {"no time was left"}


@pytest.mark.parametrize(
    ("fault", "words"),
    [("no gpu", "the driver sees no GPU"), ("no driver", "install NVIDIA's driver")],
)
def test_no_usable_gpu_is_told(tmp_path, fault, words):
    code, text, report = checked(tmp_path, fault)
    assert (code, report) == (2, None)
    assert f"gpu-check: {words}" in text.replace("libcuda.so.1 cannot be loaded: ", "")


def test_the_script_as_it_stands_needs_a_driver():
    try:
        read_driver()
    except KernelError:
        done = subprocess.run(
            [sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        assert "gpu-check: libcuda.so.1 cannot be loaded" in done.stderr
        assert "install NVIDIA's driver" in done.stderr
    else:
        pytest.skip("there is a driver here")
