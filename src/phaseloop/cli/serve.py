"""`phaseloop serve`: a model, or a pretence, behind llama-server's and OpenAI's HTTP interfaces."""

import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

from phaseloop import __version__

from .flags_help import help_text
from .serve_bind import bind
from .serve_settings import read_settings
from .serve_supervise import AWAITED, supervise

HELP = "serve a model over HTTP, with prompts and answers in separate phases"


def give_up(_number: int, _frame: object) -> None:
    raise SystemExit(0)


def run_line(arguments: Sequence[str]) -> int:
    """The exit code.  Raises UserError."""
    if any(word in ("-h", "--help", "--usage") for word in arguments):
        sys.stdout.write(help_text())
        return 0
    if "--version" in arguments:
        sys.stdout.write(f"phaseloop {__version__}\n")
        return 0
    signal.pthread_sigmask(signal.SIG_UNBLOCK, AWAITED)  # a supervisor leaves them blocked
    settings, warnings = read_settings(arguments, os.environ)
    if settings.supervise:
        return supervise(arguments, settings)
    signal.signal(signal.SIGTERM, give_up)  # until the loop takes its place
    listener = bind(settings)
    # Whatever takes its time to be imported is imported now: clients can already connect.
    return import_module("phaseloop.cli.serve_run").run(settings, listener, warnings)
