"""Save, restore and erase what a slot holds: POST /slots/{id}?action=, as llama-server has it.

Each is a request of its own, for an idle slot, that generates nothing: so it waits for a prompt
phase like any other, is seen in /slots and in traces, and keeps nobody who generates waiting.

save      computes the last token of what the slot holds again and takes the state; a file is
          written in a thread
restore   brings the file's state along, as if it had been found in host RAM
erase     leaves nothing behind
"""

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive

from phaseloop.core.vocabulary import Request, SlotIndex
from phaseloop.engine.protocol import PromptState, SlotFileError, SlotFiles
from phaseloop.engine.settings import Adapters
from phaseloop.runtime.gateway import Submission
from phaseloop.runtime.service import Service

from .answer_ends import COMPLETE, failure
from .body import parse_object
from .errors import ApiError, invalid, json_response, not_supported, unavailable
from .request_fields import Fields
from .served import Served, served_of
from .sse import ClientLeft
from .stream import closed_on_disconnect
from .table import post

FILENAME = re.compile(r"[^\x00-\x1f\x7f/\\:*?\"<>|]+")
FILENAME_BYTES_MAX = 255
TRIES_MAX = 4  # somebody else may take the slot between its release and our seat
MS_PER_S = 1e3


async def act(request: HttpRequest) -> Response:
    served = served_of(request)
    files = served.slot_files
    if files is None:
        raise not_supported(
            "This server does not support slots action. Start it with `--slot-save-path`"
        )
    slot = slot_of(request.path_params["id_slot"], served.service)
    action = request.query_params.get("action", "")
    if action not in ("save", "restore", "erase"):
        raise invalid("action: must be save, restore or erase, as in /slots/0?action=save")
    raw = await request.body()
    try:
        if action == "erase":
            return json_response(await erase(served, slot, request.receive))
        name = filename_of(raw)
        do = save if action == "save" else restore
        return json_response(await do(served, files, slot, name, request.receive))
    except ClientLeft:
        return Response(status_code=499)  # nobody reads it


ROWS = (post(act, "/slots/{id_slot}"),)


def slot_of(text: str, service: Service) -> SlotIndex:
    count = service.limits.slot_count
    if not text.isascii() or not text.isdecimal() or len(text) > 9 or int(text) >= count:
        raise invalid(f"Invalid slot ID: {text[:20]!r} is none of 0 to {count - 1}")
    return int(text)


def filename_of(raw: bytes) -> str:
    """A name within the directory; nothing that leads out of it, and no hidden file."""
    name = Fields(parse_object(raw)).text("filename", "")
    is_plain = FILENAME.fullmatch(name) and not name.startswith(".") and name == name.strip()
    if not is_plain or len(name.encode(errors="replace")) > FILENAME_BYTES_MAX:
        raise invalid("filename: must be the plain name of a file, without a path")
    return name


async def save(
    served: Served, files: SlotFiles, slot: SlotIndex, name: str, receive: Receive
) -> dict[str, object]:
    started = time.perf_counter()
    taken: list[PromptState] = []

    def submission() -> Submission:
        ids, adapters = served.service.held(slot)
        if not ids:
            raise invalid(f"slot {slot} holds nothing that could be saved")
        return warm_up(slot, ids, adapters, take=taken.append)

    await in_slot(served, slot, submission, receive)
    state = taken[-1]
    try:
        written = await served.in_thread(files.write, name, state)
    except IsADirectoryError:
        raise invalid(f"filename: {name} is a directory") from None
    except OSError as error:
        why = error.strerror or "the disk does not take it"
        raise ApiError("server_error", f"{name} cannot be written: {why}") from None
    return {
        "id_slot": slot,
        "filename": name,
        "n_saved": len(state.ids),
        "n_written": written,
        "timings": {"save_ms": (time.perf_counter() - started) * MS_PER_S},
    }


async def restore(
    served: Served, files: SlotFiles, slot: SlotIndex, name: str, receive: Receive
) -> dict[str, object]:
    started = time.perf_counter()
    try:
        state, size = await served.in_thread(files.read, name)
    except SlotFileError as error:
        raise invalid(f"Unable to restore slot: {error}") from None
    except OSError as error:
        why = error.strerror or "it cannot be read"
        raise invalid(f"Unable to restore slot: {name}: {why}") from None
    ids, adapters = state.ids.tolist(), state.adapters
    await in_slot(served, slot, lambda: warm_up(slot, ids, adapters, brought=state), receive)
    return {
        "id_slot": slot,
        "filename": name,
        "n_restored": len(state.ids),
        "n_read": size,
        "timings": {"restore_ms": (time.perf_counter() - started) * MS_PER_S},
    }


async def erase(served: Served, slot: SlotIndex, receive: Receive) -> dict[str, object]:
    erased = 0

    def submission() -> Submission | None:
        nonlocal erased
        erased = served.service.state.caches[slot].length
        if not erased:
            return None
        request = Request(0, 1, output_limit=0, slot_hint=slot, keep_cache=False)
        return Submission(request, (0,), forget=True)

    await in_slot(served, slot, submission, receive)
    return {"id_slot": slot, "n_erased": erased}


def warm_up(
    slot: SlotIndex,
    ids: Sequence[int],
    adapters: Adapters,
    *,
    brought: PromptState | None = None,
    take: Callable[[PromptState], None] | None = None,
) -> Submission:
    """A request whose prompt stays in the slot, and that generates nothing."""
    request = Request(0, len(ids), output_limit=0, slot_hint=slot)
    return Submission(request, tuple(ids), brought=brought, take=take, adapters=adapters)


async def in_slot(
    served: Served, slot: SlotIndex, submission: Callable[[], Submission | None], receive: Receive
) -> None:
    """Wait until the slot is idle, and have the request done there; none means nothing is to do.

    Raises ApiError, and ClientLeft once the client has.
    """
    service = served.service
    for _ in range(TRIES_MAX):
        async with idle(service, slot, receive):
            wanted = submission()
            if wanted is None:
                return
            call = service.gateway.submit([wanted])
        async with closed_on_disconnect(call, receive):
            stream = call.streams[0]
            async for _item in stream:
                pass
        if stream.outcome is None:
            raise ClientLeft
        if stream.outcome not in COMPLETE:
            raise failure(stream.outcome, stream.request, service.limits)
        if stream.timing.slots.get(0) == slot:
            return
    raise unavailable(f"slot {slot} was taken by others again and again; try later")


@asynccontextmanager
async def idle(service: Service, slot: SlotIndex, receive: Receive) -> AsyncGenerator[None]:
    """Entered as soon as nobody sits in the slot.  Raises ClientLeft if the client is faster."""
    if service.state.slots[slot] is None:
        yield
        return
    changed = asyncio.Event()

    async def freed() -> None:
        while service.state.slots[slot] is not None and not service.has_ended:
            changed.clear()
            await changed.wait()

    async def left() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    def observe(*_: object) -> None:
        changed.set()

    with service.observed(observe):
        tasks = [asyncio.create_task(one) for one in (freed(), left(), service.ended())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[1].done():
                raise ClientLeft
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    yield
