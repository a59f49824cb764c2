"""`phaseloop top URL`: what each slot of a running server does and why, in a terminal."""

import asyncio
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from rich.console import Console
from rich.live import Live

from phaseloop.runtime.timeline import VERSION, Batch, Stretch

from .client import Address, ClientError, Exchange
from .ending import Ended
from .ending_async import run_async
from .errors import UserError
from .top_board import Board
from .top_screen import screen

HELP = "watch what each slot of a running server does, and why"
ROUTE = "/phase/events"
EVENT_STREAM = "text/event-stream"
FRAMES_PER_S = 8
RETRY_S = 1.0
EXIT_FAILED = 1
LOADING, UNAUTHORIZED = 503, 401
SLOTS_MAX = 1 << 12  # more than any terminal shows


class NotYet(Exception):
    """The server answers, but has nothing to show yet; the message is its own."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="as in http://127.0.0.1:8080")
    parser.add_argument("--api-key", metavar="KEY", help="if the server asks for one")
    parser.add_argument("--once", action="store_true", help="print how things stand, and end")


def run(args: Namespace) -> int:
    """Raises UserError."""
    if not args.once and not sys.stdout.isatty():
        raise UserError("top draws on a terminal, and its output is none; --once prints one state")
    watch = print_once if args.once else show
    try:
        address = Address.parse(args.url)
        run_async(watch(address, args.api_key))
    except ClientError as error:
        raise UserError(f"{args.url}: {error}", EXIT_FAILED) from None
    except NotYet as error:
        remedy = "try again in a moment, or leave --once out to wait for it"
        raise UserError(f"{args.url}: {error}; {remedy}", EXIT_FAILED) from None
    except Ended:
        raise
    except KeyboardInterrupt:  # how one leaves it
        return 0
    return 0


async def print_once(address: Address, api_key: str | None) -> None:
    async with aclosing(batches(address, api_key)) as stream:
        async for batch in stream:
            board = Board()
            board.take(batch)
            Console().print(screen(board, address_text(address), ""))
            return


async def show(address: Address, api_key: str | None) -> None:
    """Until the user has enough.  Raises ClientError if the server was never there."""
    board, console = Board(), Console()
    name, was_there = address_text(address), False
    with Live(console=console, auto_refresh=False, screen=True) as live:
        while True:
            try:
                async with aclosing(batches(address, api_key)) as stream:
                    async for batch in stream:
                        was_there = True
                        board.take(batch)
                        if board.is_due(FRAMES_PER_S):
                            live.update(screen(board, name, ""), refresh=True)
                problem = "the server has ended the stream"
            except NotYet as error:
                was_there = True
                problem = str(error)
            except ClientError as error:
                if not was_there:
                    raise
                problem = str(error)
            live.update(screen(board, name, f"{problem}; trying again"), refresh=True)
            await asyncio.sleep(RETRY_S)


async def batches(address: Address, api_key: str | None) -> AsyncGenerator[Batch]:
    """What a server tells.  Raises ClientError for one that is no phaseloop, NotYet for one that
    is still loading."""
    async with Exchange(address, "GET", ROUTE, api_key=api_key) as answer:
        if answer.status != 200:
            raise refusal(answer.status, await answer.body())
        if not answer.headers.get("content-type", "").startswith(EVENT_STREAM):
            raise ClientError(f"it answers, but is no phaseloop server: {ROUTE} is no event stream")
        slot_count = 0
        async for event in answer.events():
            batch = decoded(event.data)
            slot_count = checked_slots(batch, slot_count)
            yield batch


def refusal(status: int, body: bytes) -> Exception:
    try:
        message = str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        message = ""
    if status == UNAUTHORIZED:
        return ClientError("it wants a key; name it with --api-key")
    if status == LOADING and message:
        return NotYet(message)
    return ClientError(f"it answers, but is no phaseloop server: {status} for {ROUTE}")


def decoded(data: bytes) -> Batch:
    try:
        return msgspec.json.decode(data, type=Batch)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        problem = f"its events are not those of version {VERSION} ({error})"
        raise ClientError(f"{problem}; is it another version of phaseloop?") from None


def checked_slots(batch: Batch, slot_count: int) -> int:
    """How many slots there are; a batch speaks of no others.  Raises ClientError."""
    told = {record.slot for record in batch.records if isinstance(record, Stretch)}
    if batch.head is not None:
        slot_count = batch.head.slot_count
        if not 0 < slot_count <= SLOTS_MAX:
            raise ClientError(f"it has {slot_count} slots; top shows up to {SLOTS_MAX}")
        if len(told) < slot_count:
            raise ClientError("it does not say how its slots stand")
    if not slot_count or not told <= set(range(slot_count)):
        raise ClientError("its events speak of slots that it does not have")
    return slot_count


def address_text(address: Address) -> str:
    return f"{address.host}:{address.port}{address.path}"
