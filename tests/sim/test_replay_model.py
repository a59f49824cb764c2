"""Goal: an engine that replays a trace hears what the recorded one heard, in that order.

Method: a scripted engine that logs every call serves real clients, with failures at chosen places;
the trace is folded onto a second one.  The logs must be equal but for rounds that left no mark.
Then the second engine is made to differ in one thing at a time.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from scripted import ScriptedEngine, header_for

from phaseloop.core.policy import PRESETS
from phaseloop.core.state import initial
from phaseloop.core.vocabulary import LaunchRound, Request, SeatRequest
from phaseloop.engine.protocol import Content, EngineDied, Outcome, Seated, limits_of
from phaseloop.runtime.gateway import Submission
from phaseloop.runtime.service import Recording, Service
from phaseloop.runtime.trace import open_trace
from phaseloop.sim.replay import Fold
from phaseloop.sim.replay_model import Difference, EngineReplay, MissingContent


class LoggingEngine(ScriptedEngine):
    """Logs every call that changes an engine; finds `cached` tokens for everybody."""

    def __init__(self, cached: int = 0) -> None:
        super().__init__(length=3)
        self.cached = cached
        self.log: list[tuple[Any, ...]] = []

    def seat(self, seat: SeatRequest, content: Content) -> Seated:
        self.log.append(("seat", seat, content))
        super().seat(seat, content)
        return Seated(self.cached)

    def run(self, launch: LaunchRound) -> Outcome:
        self.log.append(("run", launch))
        return super().run(launch)

    def release(self, slot: int, keep: int, version: int) -> None:
        self.log.append(("release", slot, keep, version))
        super().release(slot, keep, version)


def failing(round_id: int, error: Exception) -> Callable[[LaunchRound], None]:
    def on_run(launch: LaunchRound) -> None:
        if launch.round_id == round_id:
            raise error

    return on_run


def recorded(path: Path, engine: LoggingEngine, policy: str = "barrier-fair") -> None:
    """Five clients, each with tokens, seed and choices of its own; the last leaves early."""

    async def read(stream: Any) -> None:
        async for _ in stream:
            pass

    async def main() -> None:
        limits = limits_of(engine.describe())
        header = replace(header_for(initial(limits, PRESETS[policy])), content="ids")
        asked = [
            Submission(Request(0, 40 + n, choices=1 + n % 2), tuple(range(40 + n)), seed=n)
            for n in range(5)
        ]
        with path.open("wb") as out:
            recording = Recording(out, header, pytest.fail)
            async with Service(engine, limits, PRESETS[policy], recording=recording) as service:
                with service.gateway.submit(asked[:4]) as call:
                    await asyncio.gather(*(read(stream) for stream in call.streams))
                service.gateway.submit(asked[4:]).close()
                service.shut_down()
                await service.ended()

    asyncio.run(main())


def replayed(path: Path, engine: LoggingEngine) -> EngineReplay:
    replay = EngineReplay(engine)
    with open_trace(path) as reader:
        for step in Fold(reader, tell=replay.tell, force=True):
            replay.see(step)
    return replay


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


@pytest.mark.parametrize("policy", ["barrier-fair", "quantum", "mixed", "no-cont-batching"])
def test_the_second_engine_hears_what_the_first_heard(path, policy):
    first, second = LoggingEngine(), LoggingEngine()
    recorded(path, first, policy)
    replay = replayed(path, second)
    assert second.log == first.log and len(first.log) > 15
    assert replay.differences == []
    assert replay.compared.tokens == 3 * (1 + 2 + 1 + 2)
    assert replay.compared.rounds == len(first.launches) and replay.compared.skipped == 0


def test_a_failed_round_is_left_out(path):
    first, second = LoggingEngine(), LoggingEngine()
    first.on_run = failing(2, ValueError("a bad row"))
    recorded(path, first)
    replay = replayed(path, second)
    assert replay.differences == [] and replay.compared.skipped == 1
    assert second.log == [call for call in first.log if call[0] != "run" or call[1].round_id != 2]


def test_after_the_engine_was_lost_there_is_nothing_to_compare(path):
    first, second = LoggingEngine(), LoggingEngine()
    first.on_run = failing(4, EngineDied("device lost"))
    recorded(path, first)
    replay = replayed(path, second)
    assert replay.compared.lost == "device lost" and replay.differences == []
    assert [launch.round_id for launch in second.launches] == [0, 1, 2, 3]


def test_another_token_is_named_once_per_answer(path):
    recorded(path, LoggingEngine())

    class Other(LoggingEngine):
        def run(self, launch: LaunchRound) -> Outcome:
            outcome = super().run(launch)
            tokens = tuple(
                tuple(7 if token in (1001, 1002) else token for token in ids)
                for ids in outcome.tokens
            )
            return replace(outcome, tokens=tokens)

    found = replayed(path, Other()).differences
    assert sorted((one.what, one.request_id, one.choice) for one in found) == [
        ("token", 1, 0),
        ("token", 1, 1),
    ]
    for one in found:
        assert (one.token, one.position) == (1, 42), "its prompt has 41 tokens, 0 to 40"
        assert (one.expected, one.got) == ("1001", "7")


def test_another_end_is_named(path):
    recorded(path, LoggingEngine())
    second = LoggingEngine()
    second.length = 2
    found = replayed(path, second).differences
    assert {one.request_id for one in found} == {0, 1, 2, 3}
    assert (found[0].expected, found[0].got) == ("1 tokens", "0 tokens, the end of the text")


def test_another_cache_is_named(path):
    recorded(path, LoggingEngine())
    found = replayed(path, LoggingEngine(cached=5)).differences
    expected = ("0 tokens found", "5 tokens found")
    assert found[0] == Difference("cached", 0, 0, found[0].seq, None, None, None, *expected)


def test_a_round_that_fails_now_is_named(path):
    recorded(path, LoggingEngine())
    second = LoggingEngine()
    second.on_run = failing(1, ValueError("a bad row"))
    found = replayed(path, second).differences
    assert found[0].round_id == 1
    assert (found[0].expected, found[0].got) == ("1 tokens", "a failed lane")


def test_an_engine_that_dies_now_ends_it(path):
    recorded(path, LoggingEngine())
    second = LoggingEngine()
    second.on_run = failing(1, EngineDied("no more"))
    with pytest.raises(EngineDied):
        replayed(path, second)


@pytest.mark.parametrize(
    ("line", "says"), [(b'{"line":"prompt"', "request 4"), (b'{"line":"generated"', "round ")]
)
def test_what_is_missing_is_missed(path, line, says):
    recorded(path, LoggingEngine())
    lines = path.read_bytes().splitlines(keepends=True)
    last = max(at for at, one in enumerate(lines) if one.startswith(line))
    del lines[last]
    if says == "request 4":  # the ids after it are chained to it
        lines = [one for one in lines[:last] if not one.startswith(b'{"line":"generated"')] + [
            one for one in lines[last:] if not one.startswith(b'{"line":"generated"')
        ]
    path.write_bytes(b"".join(lines))
    with pytest.raises(MissingContent, match=says if says != "request 4" else "line"):
        replayed(path, LoggingEngine())
