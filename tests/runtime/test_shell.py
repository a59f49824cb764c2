"""Goal: the parts fit: clients, loop, a real engine thread and the trace serve and fail together.

Method: whole runs on the machine's clock with a scripted engine; nothing here depends on how long
anything takes.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest
from scripted import ScriptedEngine, header_for, verify

from phaseloop.core.policy import PRESETS
from phaseloop.core.state import initial
from phaseloop.core.vocabulary import FinishReason, LaunchRound, Request, Stop
from phaseloop.engine.protocol import EngineDied, limits_of
from phaseloop.runtime.gateway import Delivered, Stream, Submission
from phaseloop.runtime.service import Recording, Service

TIMEOUT_S = 10
Answer = tuple[list[int], FinishReason | None]


async def read(stream: Stream) -> Answer:
    ids = [token async for item in stream if isinstance(item, Delivered) for token in item.ids]
    return ids, stream.outcome


async def serve(engine: ScriptedEngine, path: Path, clients: int) -> tuple[list[Answer], Stop]:
    """Some clients at once, then a shutdown, unless the engine ends before."""
    limits, policy = limits_of(engine.describe()), PRESETS["barrier-fair"]
    with path.open("wb") as out:
        recording = Recording(out, header_for(initial(limits, policy)), pytest.fail)
        async with (
            asyncio.timeout(TIMEOUT_S),
            Service(engine, limits, policy, recording=recording) as service,
        ):
            with service.gateway.submit([Submission(Request(0, 100))] * clients) as call:
                answers = await asyncio.gather(*(read(stream) for stream in call.streams))
            service.shut_down()
            stop = await service.ended()
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


def test_leaving_ends_everybody_at_once_and_the_trace_in_order(tmp_path):
    """As when the server around it fails: nobody waits for an answer that will not come."""
    path, engine = tmp_path / "trace.jsonl", ScriptedEngine(length=10**9)

    async def main() -> list[Answer]:
        limits, policy = limits_of(engine.describe()), PRESETS["barrier-fair"]
        with path.open("wb") as out:
            recording = Recording(out, header_for(initial(limits, policy)), pytest.fail)
            async with Service(engine, limits, policy, recording=recording) as service:
                call = service.gateway.submit([Submission(Request(0, 100))] * 3)
                await anext(call.streams[0])
            late = service.gateway.submit([Submission(Request(0, 100))])
            return await asyncio.gather(*(read(s) for s in (*call.streams, *late.streams)))

    outcomes = [outcome for _, outcome in asyncio.run(main())]
    assert outcomes == ["shutdown"] * 4
    assert verify(path)


def test_whoever_looks_at_the_trace_of_an_idle_server_sees_all_of_it(tmp_path):
    path, engine = tmp_path / "trace.jsonl", ScriptedEngine()

    async def main(out: BinaryIO) -> int:
        limits, policy = limits_of(engine.describe()), PRESETS["barrier-fair"]
        recording = Recording(out, header_for(initial(limits, policy)), pytest.fail)
        async with Service(engine, limits, policy, recording=recording) as service:
            with service.gateway.submit([Submission(Request(0, 100))]) as call:
                await read(call.streams[0])
            await asyncio.sleep(0)  # the loop has its turn, and finds nothing to do
            return path.read_bytes().count(b'"event":"RoundCompleted"')

    with path.open("wb") as out:
        assert asyncio.run(main(out)) == len(engine.launches)


def test_a_full_disk_costs_the_trace_and_nothing_else():
    lost: list[OSError] = []

    async def main(out: BinaryIO) -> list[Answer]:
        engine = ScriptedEngine()
        limits, policy = limits_of(engine.describe()), PRESETS["barrier-fair"]
        recording = Recording(out, header_for(initial(limits, policy)), lost.append)
        async with Service(engine, limits, policy, recording=recording) as service:
            with service.gateway.submit([Submission(Request(0, 100))]) as call:
                return [await read(call.streams[0])]

    with Path("/dev/full").open("wb", buffering=0) as out:
        answers = asyncio.run(main(out))
    assert answers == [([0, 1, 2], "stop")]
    assert [error.strerror for error in lost] == ["No space left on device"]


def test_a_change_of_policy_reaches_the_reducer():
    async def main() -> str:
        engine = ScriptedEngine()
        limits = limits_of(engine.describe())
        async with Service(engine, limits, PRESETS["barrier-fair"]) as service:
            service.change_policy(PRESETS["quantum"])
            with service.gateway.submit([Submission(Request(0, 100))]) as call:
                await read(call.streams[0])
            return service.state.policy.name

    assert asyncio.run(main()) == "quantum"
