"""Goal: after any number of clients that leave, stall or ask for too much, nothing is left behind.

Method: a server of its own on the sim engine, whose rounds take no time; a crowd of clients drawn
from a seed, at most `CROWD` at once; then the server's own figures, and the system's about it.
"""

import asyncio
import os
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from phaseloop.cli.child import ChildServer
from phaseloop.cli.client import Exchange
from phaseloop.cli.main import main

CROWD = 24
SLOTS = 8
CONTEXT = 4096
GROWTH_BYTES_MAX = 24 << 20  # between half of the crowd and all of it; the trace is on disk
SERVER = (
    "--sim", "v100x4-qwen27b", "--sim-speed", "0", "--parallel", str(SLOTS), "--ctx-size",
    str(CONTEXT), "--client-stall-ms", "200", "--metrics",
)  # fmt: skip
TURNS_MAX = 50_000  # a connection that hung up is held for as long as an idle one, 5 s


class Client:
    """One request, and how its client behaves."""

    def __init__(self, server: ChildServer, draw: random.Random, pause: asyncio.Event) -> None:
        self.server = server
        self.prompt = "word " * draw.randint(1, 300)
        self.limit = draw.randint(1, 60)
        self.leave_after = draw.randint(0, 20)  # events
        self.choices = draw.choice((1, 1, 1, 2))
        self._pause = pause  # set when others have been served meanwhile

    def exchange(self, **fields: Any) -> Exchange:
        body = {"prompt": self.prompt, "n_predict": self.limit, "ignore_eos": True, **fields}
        return Exchange(self.server.address, "POST", "/completion", body)

    async def reads(self) -> str:
        async with self.exchange(stream=True, n=self.choices) as answer:
            events = [event.data async for event in answer.events()]
        ends = [event for event in events if b'"stop":true' in event]
        assert len(ends) == self.choices, events[-1:]
        return "read"

    async def waits(self) -> str:
        async with self.exchange(stream=False) as answer:
            body = msgspec.json.decode(await answer.body())
        assert body["tokens_predicted"] == self.limit
        return "waited"

    async def leaves(self) -> str:
        """In the middle of the answer, or before its first event."""
        async with self.exchange(stream=True, n_predict=2000) as answer:
            seen = 0
            async for _ in answer.events():
                seen += 1
                if seen > self.leave_after:
                    break
        return "left"

    async def hangs_up(self) -> str:
        """Before there is an answer at all."""
        exchange = self.exchange(stream=False, n_predict=2000)
        asking = asyncio.create_task(exchange.__aenter__())
        for _ in range(self.leave_after):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        return "hung up"

    async def stalls(self) -> str:
        """Reads a little, then nothing while the others go on."""
        async with self.exchange(stream=True, n_predict=3000) as answer:
            async for _ in answer.events():
                break
            await self._pause.wait()
        return "stalled"

    async def asks_too_much(self) -> str:
        self.prompt = "x" * (CONTEXT + 1 + self.limit)
        async with self.exchange() as answer:
            error = msgspec.json.decode(await answer.body())["error"]
        assert (answer.status, error["type"]) == (400, "exceed_context_size_error")
        return "refused"


BEHAVIOURS: tuple[tuple[Callable[[Client], Awaitable[str]], int], ...] = (
    (Client.reads, 10),
    (Client.waits, 4),
    (Client.leaves, 6),
    (Client.hangs_up, 3),
    (Client.stalls, 1),
    (Client.asks_too_much, 2),
)


async def crowd(server: ChildServer, seed: int, count: int) -> Counter[str]:
    draw, room = random.Random(seed), asyncio.Semaphore(CROWD)
    done = 0
    pauses: list[tuple[int, asyncio.Event]] = []
    behaviours, weights = zip(*BEHAVIOURS, strict=True)

    async def one(client: Client, behave: Callable[[Client], Awaitable[str]]) -> str:
        nonlocal done
        try:
            return await behave(client)
        finally:
            done += 1
            for due, pause in pauses:
                if due <= done:
                    pause.set()
            room.release()

    tasks: list[asyncio.Task[str]] = []
    for number in range(count):
        await room.acquire()
        pause = asyncio.Event()
        # A quarter of the crowd stalls at most, so that there are always others to be served.
        pauses.append((min(number + CROWD, count - CROWD), pause))
        client = Client(server, draw, pause)
        (behave,) = draw.choices(behaviours, weights)
        tasks.append(asyncio.create_task(one(client, behave)))
    return Counter(await asyncio.gather(*tasks))


async def get(server: ChildServer, route: str) -> bytes:
    async with Exchange(server.address, "GET", route) as answer:
        assert answer.status == 200
        return await answer.body()


async def at_rest(server: ChildServer) -> dict[str, float]:
    """The server's figures once every slot is empty and nobody queues."""
    for _ in range(TURNS_MAX):
        text = (await get(server, "/metrics")).decode()
        rows = [line for line in text.splitlines() if line and line[0] != "#"]
        figures = {name: float(value) for name, value in (row.rsplit(" ", 1) for row in rows)}
        if (
            figures['phaseloop:slots{role="empty"}'] == SLOTS
            and not figures["phaseloop:queue_length"]
        ):
            return figures
    raise AssertionError(f"slots are left occupied: {figures}")


def memory_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def descriptors(pid: int) -> int:
    """How many files and sockets a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208  it is a count


async def closes_down_to(server: ChildServer, count: int) -> bool:
    """Whether the server closes what clients left open."""
    for _ in range(TURNS_MAX):
        if descriptors(server.pid) <= count:
            return True
        await get(server, "/health")
    return False


async def soak(count: int, trace: Path) -> None:
    async with ChildServer((*SERVER, "--trace", str(trace))) as server:
        await crowd(server, 1, CROWD)  # whatever is made once has been made
        await at_rest(server)
        opened = descriptors(server.pid)
        first = await crowd(server, 2, count // 2)
        await at_rest(server)
        memory = memory_bytes(server.pid)
        second = await crowd(server, 3, count - count // 2)
        figures = await at_rest(server)
        assert memory_bytes(server.pid) - memory < GROWTH_BYTES_MAX, "memory grows"
        assert await closes_down_to(server, opened), "files or sockets leak"
    behaviours = first + second
    assert set(behaviours) == {"read", "waited", "left", "hung up", "stalled", "refused"}
    pages = {use: figures[f'phaseloop:kv_pages{{use="{use}"}}'] for use in ("free", "cached")}
    assert figures['phaseloop:kv_pages{use="reserved"}'] == 0, f"pages are lost: {pages}"
    assert sum(pages.values()) == CONTEXT / 256
    assert figures["phaseloop:mixed_rounds_total"] == 0
    ends = {name: value for name, value in figures.items() if "requests_total" in name}
    assert ends['phaseloop:requests_total{reason="cancelled"}'] >= behaviours["left"] // 2
    assert ends['phaseloop:requests_total{reason="length"}'] >= behaviours["read"]


@pytest.mark.parametrize(
    "count", (400, pytest.param(2000, marks=(pytest.mark.grid, pytest.mark.timeout(600))))
)
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
def test_a_crowd_leaves_nothing_behind(tmp_path: Path, count: int):
    trace = tmp_path / "trace.jsonl"
    asyncio.run(soak(count, trace))
    assert main(["replay", str(trace)]) == 0, "and every decision can be replayed"
