"""The ending of what runs on asyncio's loop: its main task is cancelled, as Ctrl-C does it."""

import asyncio
import signal
from collections.abc import Coroutine, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

from .ending import Ended, disregard, end, exchange

Result = TypeVar("Result")


def run_async(main: Coroutine[Any, Any, Result]) -> Result:
    """As asyncio.run, but SIGTERM and SIGHUP cancel `main`, too, where end_in_order was called.

    Raises Ended, also where the ending failed in its turn: who hung up cannot be written to.
    """
    came: list[int] = []

    async def until_ended() -> Result:
        with cancelling(came):
            return await main

    try:
        return asyncio.run(until_ended())
    except (asyncio.CancelledError, Exception):
        if not came:
            raise
        raise Ended(came[0]) from None


@contextmanager
def cancelling(came: list[int]) -> Generator[None]:
    """The first of the signals is put into `came`, and cancels the task that entered this.

    Between callbacks: asyncio's own handler of SIGINT cancels at once, also in the middle of one
    that has just looked whether its future is done, and that one then fails.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def cancel(number: int, _frame: object) -> None:
        exchange(cancel, disregard)
        came.append(number)
        if len(came) == 1:
            loop.call_soon_threadsafe(task.cancel)

    def interrupt(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # who cannot wait asks again
        cancel(number, frame)

    exchange(end, cancel)
    before = signal.getsignal(signal.SIGINT)
    if callable(before):  # not where it is ignored
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        exchange(cancel, end)
        if callable(before):
            signal.signal(signal.SIGINT, before)
