"""What the prompts of a call yield, in one order; and what ends it early."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import TypeAlias

from starlette.types import Receive

from phaseloop.core.state import Limits
from phaseloop.runtime.gateway import Call, Delivered, Ended, Item

from .answer_ends import COMPLETE, failure
from .answer_reply import Part
from .sse import ClientLeft

Taken: TypeAlias = tuple[Part, Item]


async def items_of(parts: Sequence[Part], limits: Limits) -> AsyncGenerator[Taken]:
    """Everything until all prompts have ended well; close it when leaving early.

    Raises ApiError as soon as one has not, and ClientLeft once the call has been closed.
    """
    taken = _items_of_one(parts[0]) if len(parts) == 1 else _items_of_many(parts)
    async for part, item in taken:
        if isinstance(item, Ended) and item.reason not in COMPLETE:
            raise failure(item.reason, part.stream.request, limits)
        if isinstance(item, Delivered) and len(item.ids) > 1:
            for one in singly(item):
                yield part, one
        else:
            yield part, item
    for part in parts:
        outcome = part.stream.outcome
        if outcome is None:
            raise ClientLeft
        if outcome not in COMPLETE:
            raise failure(outcome, part.stream.request, limits)


def singly(delivered: Delivered) -> Iterator[Delivered]:
    """Tokens of one round, with drafts, as if they came one by one.

    So an answer ends where it would have ended: within a round, at the token that completes a stop
    string.
    """
    for place, token in enumerate(delivered.ids):
        likelihoods = delivered.likelihoods[place : place + 1]
        yield Delivered(delivered.choice, 1, (token,), likelihoods)


async def _items_of_one(part: Part) -> AsyncGenerator[Taken]:
    async for item in part.stream:
        yield part, item


async def _items_of_many(parts: Sequence[Part]) -> AsyncGenerator[Taken]:
    """One item of a stream is taken at a time, so that each outbox still notices a slow client."""
    waiting = {asyncio.create_task(_next(part)): part for part in parts}
    try:
        while waiting:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in waiting if task.done()]:
                part, item = waiting.pop(task), task.result()
                if item is None:
                    continue
                waiting[asyncio.create_task(_next(part))] = part
                yield part, item
    finally:
        for task in waiting:
            task.cancel()


async def _next(part: Part) -> Item | None:
    return await anext(part.stream, None)


@asynccontextmanager
async def closed_on_disconnect(call: Call, receive: Receive) -> AsyncGenerator[None]:
    """Within, the call is closed when the client leaves; and at the end, however it comes."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        call.close()

    with call:
        watcher = asyncio.create_task(watch())
        try:
            yield
        finally:
            watcher.cancel()
