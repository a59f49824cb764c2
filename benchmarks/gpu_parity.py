"""The kernels' tests on a device, in this process: what failed, what was skipped, and why."""

import os
import time
from collections import Counter
from pathlib import Path
from typing import cast

import pytest
from gpu_progress import Progress
from msgspec import Struct

from phaseloop.kernels.cupy_device import CupyDevice

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests" / "kernels"
FAILURES_MAX = 20  # a fault of the device makes all that follow fail
REASON_MAX = 500  # characters


class Parity(Struct, frozen=True):
    passed: int
    failed: dict[str, str]  # test -> the end of its report
    skipped: dict[str, int]  # reason -> how many
    unfinished: int  # for which there was no time
    broken: str = ""  # why there were no tests

    @property
    def is_good(self) -> bool:
        return self.passed > 0 and not (self.failed or self.unfinished or self.broken)


class Lent(Struct):
    """Found by the fixture `host` under its name: a device whose kernels are loaded already."""

    device: CupyDevice


class Watch:
    """A pytest plugin that counts, shows how far it is, and stops when the time is up."""

    def __init__(self, device: CupyDevice, deadline_s: float, progress: Progress) -> None:
        self._lent, self._deadline_s, self._progress = Lent(device), deadline_s, progress
        self.passed, self.started, self.count = 0, 0, 0
        self.failed: dict[str, str] = {}
        self.skipped: Counter[str] = Counter()

    def pytest_configure(self, config: pytest.Config) -> None:
        config.pluginmanager.register(self._lent, "phaseloop-device")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.count = len(session.items)
        self._progress.expect(self.count)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.started += 1
        self._progress.step(nodeid.split("/")[-1])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed[report.nodeid] = report.longreprtext[-REASON_MAX:]
        elif report.skipped:
            self.skipped[reason_of(report.longrepr)] += 1
        elif report.when == "call":
            self.passed += 1

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        if time.monotonic() > self._deadline_s:
            item.session.shouldstop = "the time is up"

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed[report.nodeid] = report.longreprtext[-REASON_MAX:]


def reason_of(told: object) -> str:
    """Of a skipped test's `longrepr`: file, line and words."""
    words = cast(tuple[str, int, str], told)[2] if isinstance(told, tuple) else str(told)
    return words.removeprefix("Skipped: ")


def run_tests(
    device: CupyDevice, seconds: float, progress: Progress, tests: tuple[Path, ...] = (TESTS,)
) -> Parity:
    watch = Watch(device, time.monotonic() + seconds, progress)
    arguments = [
        "-p", "no:terminal", "-p", "no:cacheprovider", "-c", os.devnull, f"--rootdir={ROOT}",
        f"--confcutdir={TESTS}", "--import-mode=importlib", f"--maxfail={FAILURES_MAX}",
        "--phaseloop-device=cuda", *map(str, tests),
    ]  # fmt: skip
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # of this process: pytest is all it needs
    code = pytest.main(arguments, plugins=[watch])
    broken = "" if watch.count else f"pytest found no tests (exit code {int(code)})"
    unfinished = watch.count - watch.started
    return Parity(watch.passed, watch.failed, dict(watch.skipped), unfinished, broken)
