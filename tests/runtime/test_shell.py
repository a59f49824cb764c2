"""Goal: the parts fit: clients, loop, a real engine thread and the trace serve and fail together.

Method: whole runs on the machine's clock with a scripted engine; nothing here depends on how long
anything takes.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

from scripted import ScriptedEngine, header_for, verify

from phaseloop.core.policy import PRESETS
from phaseloop.core.state import initial
from phaseloop.core.vocabulary import (
    FinishReason,
    LaunchRound,
    Request,
    ShutdownRequested,
    Stop,
)
from phaseloop.engine.protocol import EngineDied, limits_of
from phaseloop.runtime.clock import AsyncioClock
from phaseloop.runtime.gateway import Delivered, Gateway, Stream, Submission
from phaseloop.runtime.loop import Stepper, run
from phaseloop.runtime.mailbox import Mailbox
from phaseloop.runtime.perform import Performer
from phaseloop.runtime.trace import TraceWriter
from phaseloop.runtime.worker import ThreadWorker

TIMEOUT_S = 10
Answer = tuple[list[int], FinishReason | None]


async def read(stream: Stream) -> Answer:
    ids = [token async for item in stream if isinstance(item, Delivered) for token in item.ids]
    return ids, stream.outcome


async def serve(engine: ScriptedEngine, path: Path, clients: int) -> tuple[list[Answer], Stop]:
    """Some clients at once, then a shutdown, unless the engine ends before."""
    clock = AsyncioClock()
    limits = limits_of(engine.describe())
    mailbox = Mailbox(clock)
    gateway = Gateway(limits, clock, mailbox, lambda: 0)
    worker = ThreadWorker(engine, clock, mailbox.post)
    state = initial(limits, PRESETS["barrier-fair"])
    with path.open("wb") as out:
        trace = TraceWriter(out, header_for(state), state)
        stepper = Stepper(state, Performer(worker, gateway), trace)
        running = asyncio.create_task(run(stepper, mailbox))
        async with asyncio.timeout(TIMEOUT_S):
            with gateway.submit([Submission(Request(0, 100))] * clients) as call:
                answers = await asyncio.gather(*(read(stream) for stream in call.streams))
            mailbox.post(ShutdownRequested(at_ns=clock.now_ns()))
            stop = await running
            await worker.close()
        stepper.close(stop.reason, stop.exit_code)
    return answers, stop


def failing(kind: str, error: Exception) -> Callable[[LaunchRound], None]:
    """Raises in the first round of a kind."""
    failed: list[int] = []

    def on_run(launch: LaunchRound) -> None:
        if launch.kind == kind and not failed:
            failed.append(launch.round_id)
            raise error

    return on_run


def test_clients_are_served_and_the_trace_verifies(tmp_path):
    path = tmp_path / "trace.jsonl"
    answers, stop = asyncio.run(serve(ScriptedEngine(), path, clients=5))
    assert answers == [([1000 * n, 1000 * n + 1, 1000 * n + 2], "stop") for n in range(5)]
    assert stop == Stop(0, "shutdown")
    assert verify(path)


def test_a_failed_round_ends_its_own_requests_only(tmp_path):
    path = tmp_path / "trace.jsonl"
    engine = ScriptedEngine()
    engine.on_run = failing("decode", ValueError("a bad row"))
    answers, stop = asyncio.run(serve(engine, path, clients=5))
    outcomes = [outcome for _, outcome in answers]
    assert outcomes == ["failed", "failed", "stop", "stop", "stop"], "two slots, two lanes"
    assert answers[0] == ([0], "failed"), "what was delivered before stays"
    assert stop == Stop(0, "shutdown")
    assert verify(path)


def test_a_lost_engine_ends_everybody_and_the_server(tmp_path):
    path = tmp_path / "trace.jsonl"
    engine = ScriptedEngine()
    engine.on_run = failing("decode", EngineDied("device lost"))
    answers, stop = asyncio.run(serve(engine, path, clients=5))
    assert [outcome for _, outcome in answers] == ["engine_lost"] * 5
    assert stop == Stop(70, "engine_lost")
    assert verify(path)
