"""Where logs go: console lines for people, JSON lines for machines, on stderr and into a file.

Who logs never waits.  Lines are formatted and written by a thread of their own; what it cannot get
rid of in time, because nobody empties the pipe or a disk hangs, is dropped and counted.
"""

import logging
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from io import FileIO
from queue import Full, Queue
from typing import Literal, TypeAlias

import structlog
from structlog.typing import EventDict, Processor

from .errors import UserError

Form: TypeAlias = Literal["console", "json"]
LINES_WAITING_MAX = 10_000
CLOSE_S = 1.0  # for what is still to be written when the process ends
LEVELS = {  # of -lv
    "0": logging.ERROR,
    "1": logging.ERROR,
    "2": logging.WARNING,
    "3": logging.INFO,
    "4": logging.DEBUG,
    "5": logging.DEBUG,
}
OFF = logging.CRITICAL + 1
CHATTY = ("hypercorn.error", "asyncio")  # what they say at `info`, phaseloop says itself
EVENT_WIDTH = 20


class Target:
    """A file and how lines look there.

    Unbuffered: a buffer's lock, held by a thread that hangs, would keep the process from ending.
    """

    def __init__(self, file: FileIO, form: Form, *, colours: bool = False) -> None:
        self._file = file
        self._formatter = structlog.stdlib.ProcessorFormatter(
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *rendering(form, colours),
            ],
            foreign_pre_chain=COMMON,
        )
        self._is_broken = False

    def write(self, record: logging.LogRecord) -> None:
        """A file that fails is left alone from then on: there is nowhere to complain."""
        if self._is_broken:
            return
        line = f"{self._formatter.format(record)}\n".encode(errors="backslashreplace")
        try:
            while line:
                line = line[self._file.write(line) or 0 :]
        except (OSError, ValueError):
            self._is_broken = True

    def close(self) -> None:
        self._file.close()


class Logs(logging.Handler):
    """Takes records from any thread, and writes them from its own."""

    def __init__(self, targets: Sequence[Target], waiting_max: int = LINES_WAITING_MAX) -> None:
        super().__init__()
        self._targets = targets
        self._records: Queue[logging.LogRecord | None] = Queue(waiting_max)
        self._lost = 0
        self._thread = threading.Thread(target=self._work, name="logs", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._records.put_nowait(record)
        except Full:
            self._lost += 1

    def close(self) -> None:
        """Write what is waiting, unless that takes longer than anybody should wait."""
        with suppress(Full):
            self._records.put(None, timeout=CLOSE_S)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            for target in self._targets:
                target.close()
        super().close()

    def _work(self) -> None:
        while (record := self._records.get()) is not None:
            for target in self._targets:
                target.write(record)
            if self._lost and self._records.empty():
                lost, self._lost = self._lost, 0
                logging.getLogger(__name__).warning("%d log lines were lost", lost)


def start_logs(
    *,
    level: int = logging.INFO,
    form: Form = "console",
    colours: bool | None = None,
    path: str | None = None,
) -> Logs:
    """Send all logs of the process to stderr, and to the file if one is named.

    `colours` None: if stderr is a terminal.  Raises UserError for a file that cannot be written.
    """
    targets: list[Target] = []
    with suppress(OSError, ValueError):  # a stderr that leads nowhere
        stderr = FileIO(sys.stderr.fileno(), "w", closefd=False)
        on_terminal = stderr.isatty() if colours is None else colours
        targets.append(Target(stderr, form, colours=on_terminal))
    if path is not None:
        try:
            targets.append(Target(FileIO(path, "a"), form))
        except OSError as error:
            raise UserError(f"--log-file {path}: {error.strerror or error}") from None
    logs = Logs(targets)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.stdlib.filter_by_level,
            *COMMON,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    root = logging.getLogger()
    root.handlers = [logs]
    root.setLevel(level)
    for name in CHATTY:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))
    return logs


COMMON: list[Processor] = [
    structlog.stdlib.add_log_level,
    structlog.stdlib.PositionalArgumentsFormatter(),
    structlog.processors.TimeStamper(fmt="iso"),
    structlog.processors.format_exc_info,  # here, as the exception is that of the caller's thread
]


def rendering(form: Form, colours: bool) -> list[Processor]:
    if form == "json":
        return [structlog.processors.JSONRenderer()]
    return [
        without_request_name,
        structlog.dev.ConsoleRenderer(
            colors=colours,
            pad_event_to=EVENT_WIDTH,
            sort_keys=False,
            exception_formatter=structlog.dev.plain_traceback,
        ),
    ]


def without_request_name(_logger: object, _method: str, event: EventDict) -> EventDict:
    """A client may quote it when something failed; other lines are readable without."""
    if event.get("level") in ("info", "debug"):
        event.pop("http_request", None)
    return event
