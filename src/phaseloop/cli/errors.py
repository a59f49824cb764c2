"""What a user did wrong, as opposed to what phaseloop did."""

from argparse import ArgumentTypeError
from pathlib import Path

EXIT_USAGE = 2


class UserError(Exception):
    """Printed as `phaseloop: <message>`, without a traceback.

    The message names what, where and the remedy.  `exit_code` is the process's.
    """

    def __init__(self, message: str, exit_code: int = EXIT_USAGE) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def some_path(text: str) -> Path:
    """A path as an argument; an empty one would mean the current directory."""
    if not text:
        raise ArgumentTypeError("the path is empty")
    return Path(text)
