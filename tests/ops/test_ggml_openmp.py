"""Goal: ggml's threads spin for a bounded time, unless whoever starts the process says otherwise.

Method: processes with different environments, and what OpenMP itself reports of its settings.
"""

import os
import subprocess
import sys

import pytest

pytest.importorskip("ggml")

PROGRAM = "from phaseloop.ops.ggml_openmp import ggml"
ASKED = {"OMP_DISPLAY_ENV": "VERBOSE"}  # OpenMP prints its settings when it is loaded


def spin_turns(environment):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=kept | ASKED | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    found = [line for line in ran.stderr.splitlines() if "GOMP_SPINCOUNT" in line]
    if not found:
        pytest.skip("this ggml waits without GNU OpenMP")
    return found[0].split("=")[1].strip(" '")


def test_it_is_bounded_by_default():
    assert spin_turns({}) == "10000"


def test_the_environment_has_the_last_word():
    assert spin_turns({"GOMP_SPINCOUNT": "77"}) == "77"
    assert spin_turns({"OMP_WAIT_POLICY": "PASSIVE"}) == "0"
