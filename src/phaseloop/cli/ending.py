"""SIGTERM and SIGHUP end a command as Ctrl-C does: in order.

Nobody is left behind who was started for the occasion, and what was measured is kept.  Only the
first counts: senders like timeout(1) send two, and the second would interrupt the ending.
"""

import signal
from collections.abc import Callable
from typing import TypeAlias

Handler: TypeAlias = Callable[[int, object], None]
SIGNALS = (signal.SIGTERM, signal.SIGHUP)
EXIT_SIGNAL = 128  # and the signal's number, as shells have it


class Ended(KeyboardInterrupt):
    """One of the signals came."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def interrupted_code(interruption: KeyboardInterrupt) -> int:
    """The exit code of what it has ended."""
    number = interruption.number if isinstance(interruption, Ended) else signal.SIGINT
    return EXIT_SIGNAL + number


def end_in_order() -> None:
    """From here on the signals raise Ended, but for those that are ignored, as under nohup."""
    exchange(signal.SIG_DFL, end)


def end(number: int, _frame: object) -> None:
    exchange(end, disregard)
    raise Ended(number)


def disregard(_number: int, _frame: object) -> None:
    """It ends already."""


def exchange(present: Handler | signal.Handlers, other: Handler) -> None:
    """The signals that the one handles are the other's."""
    for number in SIGNALS:
        if signal.getsignal(number) == present:
            signal.signal(number, other)
