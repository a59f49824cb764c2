"""A `phaseloop serve` of our own, for commands that need a server for a while."""

import asyncio
import os
import re
import sys
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Self

from . import PHASELOOP
from .client import Address, ClientError, Exchange
from .errors import UserError
from .serve_settings import read_settings

URL = re.compile(rb"https?://[^\s\"']+:\d+")
# Its log says where it listens, whatever the arguments before this one ask for.
TALKATIVE = ("--log-verbosity", "3")
LINES_KEPT = 20  # of its log, to show if it fails
HEALTH_INTERVAL_S = 0.05
END_S = 10.0  # more than an orderly end takes (R16)


class ChildServer:
    """Use it as an async context manager: entered once the model is loaded, ended on leaving."""

    def __init__(self, arguments: Sequence[str], *, echo: bool = False) -> None:
        """`arguments` are those of `phaseloop serve`; `echo` shows its log.

        Raises UserError for arguments that are wrong, or that silence the log.
        """
        read_settings(arguments, os.environ)  # before ours follow, which are nobody's mistake
        if "--log-disable" in arguments:
            raise UserError("--log-disable would hide where this server listens: leave it out")
        self.address: Address
        self._arguments = arguments
        self._echo = echo
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)
        self._process: Process
        self._reading: asyncio.Task[None]
        self._url: asyncio.Future[str]

    @property
    def pid(self) -> int:
        return self._process.pid

    async def __aenter__(self) -> Self:
        """Raises UserError with the end of its log if it does not come up."""
        self._url = asyncio.get_running_loop().create_future()
        command = (*PHASELOOP, "serve", "--port", "0", *self._arguments, *TALKATIVE)
        self._process = await asyncio.create_subprocess_exec(*command, stderr=PIPE)
        self._reading = asyncio.create_task(self._read())
        try:
            self.address = Address.parse(await self._url)
            # Another process: there is no event to wait for.
            while not await self._is_healthy():  # noqa: ASYNC110
                await asyncio.sleep(HEALTH_INTERVAL_S)
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end()

    async def _read(self) -> None:
        assert self._process.stderr is not None
        async for line in self._process.stderr:
            text = line.decode(errors="replace").rstrip()
            self._lines.append(text)
            if self._echo:
                sys.stderr.write(f"{text}\n")
            match = URL.search(line)
            if match is not None and not self._url.done():
                self._url.set_result(match.group().decode())
        if not self._url.done():
            self._url.set_exception(self._failure())

    async def _is_healthy(self) -> bool:
        if self._process.returncode is not None:
            await self._reading
            raise self._failure()
        with suppress(ClientError):
            async with Exchange(self.address, "GET", "/health") as answer:
                return answer.status == 200
        return False

    def _failure(self) -> UserError:
        log = "\n".join(f"  {line}" for line in self._lines)
        return UserError(f"the server did not come up; the end of its log:\n{log}")

    async def _end(self) -> None:
        with suppress(ProcessLookupError):
            self._process.terminate()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(END_S):
                    await self._process.wait()
        finally:  # also where this waiting is cut short, by a second Ctrl-C
            if self._process.returncode is None:
                self._process.kill()
                await self._process.wait()
        await self._reading
