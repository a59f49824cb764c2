"""`serve --supervise`: a parent that starts the server again when its process dies.

A fault in compiled code takes the whole process down.  The parent has none of it: it waits, passes
signals on, and starts another server if the last one died of a signal or lost its engine.  Any
other exit code is the server's own decision, and the parent's, too.
"""

import os
import signal
import subprocess
import time
from collections.abc import Sequence

import structlog

from . import PHASELOOP
from .serve_logs import logs_of
from .serve_settings import Settings

EXIT_LOST = 70
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
AWAITED = (*PASSED_ON, signal.SIGCHLD)
DELAYS_S = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # before the first restart, the second, ...
HEALTHY_S = 60.0  # who lived so long starts anew with the first delay
FLAG, VARIABLE = "--supervise", "PHASELOOP_SUPERVISE"

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


def supervise(arguments: Sequence[str], settings: Settings) -> int:
    """The last server's exit code; 128 + its number if a signal that was passed on killed it."""
    logs = logs_of(settings)
    signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)  # they wait until they are asked for
    try:
        return keep_running([word for word in arguments if word != FLAG])
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, AWAITED)
        logs.close()


def keep_running(arguments: Sequence[str]) -> int:
    deaths = 0
    while True:
        started_s = time.monotonic()
        child = start(arguments)
        log.info("server started", pid=child.pid)
        is_wanted = attend(child)
        code = child.returncode
        if not is_wanted or not (code < 0 or code == EXIT_LOST):
            return 128 - code if code < 0 else code
        if time.monotonic() - started_s >= HEALTHY_S:
            deaths = 0
        delay_s = DELAYS_S[min(deaths, len(DELAYS_S) - 1)]
        deaths += 1
        cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        log.error("server died", pid=child.pid, cause=cause, restart_in_s=delay_s)
        if signal.sigtimedwait(PASSED_ON, delay_s) is not None:
            return 0  # nobody is there to be ended


def start(arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    """In a process group of its own, so that Ctrl-C reaches it once, through the parent.

    It inherits that the signals are blocked, and lifts that itself (cli/serve.py).
    """
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    return subprocess.Popen(
        (*PHASELOOP, "serve", *arguments),
        env=environment,
        process_group=0,
    )


def attend(child: subprocess.Popen[bytes]) -> bool:
    """Wait for its end, passing signals on; whether nobody has told it to end."""
    is_wanted = True
    while child.poll() is None:
        number = signal.sigwait(AWAITED)
        if number != signal.SIGCHLD:
            is_wanted = False
            child.send_signal(number)
    return is_wanted
