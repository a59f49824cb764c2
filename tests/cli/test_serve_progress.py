"""Goal: a long check of weights is seen to go on, in lines where there is no terminal.

Method: a clock that the test sets, a reporter that keeps what it is told.
"""

import pytest

from phaseloop.cli.serve_loaded import Interrupted
from phaseloop.cli.serve_progress import LINE_EVERY_NS, CheckProgress


class Reporter:
    def __init__(self) -> None:
        self.told: list[dict[str, object]] = []
        self.is_wanted = True

    def say(self, event: str, **values: object) -> None:
        self.told.append({"event": event, **values})

    def warn(self, event: str, **values: object) -> None:
        raise AssertionError(event)

    def check(self) -> None:
        if not self.is_wanted:
            raise Interrupted


def test_a_line_comes_when_the_last_one_is_old_enough():
    now_ns, reporter = 0, Reporter()
    with CheckProgress(1000, reporter, lambda: now_ns) as progress:
        for done in range(0, 1001, 100):
            now_ns += LINE_EVERY_NS // 4
            progress.at(done, 1000)
    assert [line["checked"] for line in reporter.told] == ["30%", "70%"]


def test_a_quick_check_says_nothing():
    reporter = Reporter()
    with CheckProgress(1000, reporter, lambda: 0) as progress:
        progress.at(1000, 1000)
    assert reporter.told == []


def test_nobody_goes_on_for_whom_nobody_waits():
    reporter = Reporter()
    with CheckProgress(1000, reporter, lambda: 0) as progress:
        reporter.is_wanted = False
        with pytest.raises(Interrupted):
            progress.at(1, 1000)
