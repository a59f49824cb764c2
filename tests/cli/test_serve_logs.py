"""Goal: logs say what happened in the form that was asked for, and nobody waits for them.

Method: handlers over pipes, one of which nobody empties; the lines that come out.
"""

import json
import logging
import os
from io import FileIO

import pytest
import structlog

from phaseloop.cli.errors import UserError
from phaseloop.cli.logs import Logs, Target, start_logs


@pytest.fixture(autouse=True)
def restored():
    """The process's logging as it was."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("test", logging.INFO, "", 0, text, (), None)


def test_lines_reach_the_file_whoever_logs(tmp_path):
    path = tmp_path / "log"
    logs = start_logs(form="json", path=str(path))
    structlog.get_logger("a").info("began", prompt=3)
    logging.getLogger("b").warning("%d left", 2)
    structlog.get_logger("a").debug("too much")
    try:
        raise ValueError("broken")
    except ValueError:
        structlog.get_logger("a").exception("failed")
    logs.close()
    first, second, third = map(json.loads, path.read_text().splitlines())
    assert (first["event"], first["prompt"], first["level"]) == ("began", 3, "info")
    assert (second["event"], second["level"]) == ("2 left", "warning")
    assert "ValueError: broken" in third["exception"]


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(UserError, match="--log-file"):
        start_logs(path=str(tmp_path / "none" / "log"))


def test_console_lines_have_the_event_and_its_values(tmp_path):
    path = tmp_path / "log"
    logs = start_logs(path=str(path))
    structlog.get_logger("a").info("began", prompt=3, http_request="req_1")
    structlog.get_logger("a").error("failed", http_request="req_1")
    logs.close()
    first, second = path.read_text().splitlines()
    assert "[info" in first and "began" in first and first.rstrip().endswith("prompt=3")
    assert second.rstrip().endswith("http_request=req_1")  # by which a client's report is found


def test_who_logs_does_not_wait_for_a_pipe_that_nobody_empties():
    read_end, write_end = os.pipe()
    with FileIO(write_end, "w") as out, FileIO(read_end, "r") as source:
        logs = Logs([Target(out, "json")], waiting_max=10)
        root = logging.getLogger()
        root.handlers = [logs]
        line = "x" * 4096
        for _ in range(100):  # 400 kB: more than a pipe and ten lines hold
            logs.emit(record(line))
        received = b""
        while b"lines were lost" not in received:
            received += source.read(1 << 16)
        logs.close()
    *whole, told = received.splitlines()[:-1] + received.splitlines()[-1:]
    assert all(len(json.loads(text)["event"]) == 4096 for text in whole)
    assert json.loads(told)["event"] == f"{100 - len(whole)} log lines were lost"


def test_an_output_that_fails_is_left_alone(tmp_path):
    path = tmp_path / "log"
    with FileIO("/dev/full", "w") as full, FileIO(path, "w") as fine:
        logs = Logs([Target(full, "json"), Target(fine, "json")])
        for number in range(3):
            logs.emit(record(str(number)))
        logs.close()
    assert [json.loads(text)["event"] for text in path.read_text().splitlines()] == ["0", "1", "2"]
