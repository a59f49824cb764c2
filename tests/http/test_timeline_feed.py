"""Goal: viewers are told everything or that they missed something, and cost nothing when gone.

Method: the feed on a service whose engine is held in a known round, ticking at every turn of the
event loop; and the route over a socket, with the client of `phaseloop top`.
"""

import asyncio
import itertools
import json

import pytest
from http_world import Hold, TextEngine, client_of, until, world
from socket_server import listening
from storyteller import Storyteller

from phaseloop.cli.client import Address, Exchange
from phaseloop.cli.top import print_once
from phaseloop.core.vocabulary import Request
from phaseloop.http.timeline_feed import BATCHES_MAX, VIEWERS_MAX, Crowded, Feed, Viewer
from phaseloop.runtime.gateway import Submission
from phaseloop.runtime.timeline import Batch, Recorder

pytestmark = pytest.mark.asyncio

LONG = Submission(Request(0, 100, output_limit=9), tuple(range(100)))
SHORT = Submission(Request(0, 20, output_limit=9), tuple(range(20)))


async def batch_of(viewer: Viewer) -> dict:
    return json.loads(await anext(viewer))


async def record_of(viewer: Viewer, *start) -> list:
    """The next record that begins so, whatever comes before it."""
    while True:
        for record in (await batch_of(viewer))["records"]:
            if (record[0], *record[2 : 1 + len(start)]) == start:
                return record


async def test_a_viewer_hears_how_everything_stands_and_then_what_changes():
    engine = TextEngine()
    async with world(engine) as here:
        hold = engine.on_run = Hold("prefill", 2)
        with (
            Feed(tick_s=0).watched(here.service, 123) as viewer,
            here.service.gateway.submit([LONG, SHORT]) as call,
        ):
            first = await batch_of(viewer)
            assert first["head"]["started"] == 123
            assert "gap" not in first
            slots = [record for record in first["records"] if record[0] == "slot"]
            assert [record[2:4] for record in slots] == [[0, "idle"], [1, "idle"]]
            await hold.reached.wait()
            # 44 and 20 rows went into the first round: the second prompt is done, the first is not.
            ready = await record_of(viewer, "slot", 1, "ready")
            assert ready[4:] == ["ready", "barrier", 1, 0, [0]]
            hold.let_go()
            assert (await record_of(viewer, "slot", 1, "decode"))[6] == 1
            for stream in call.streams:
                async for _ in stream:
                    pass


async def test_who_joins_in_the_middle_knows_as_much_as_the_others():
    engine = TextEngine()
    feed = Feed(tick_s=0)
    async with world(engine) as here:
        hold = engine.on_run = Hold("prefill", 2)
        with feed.watched(here.service, 0) as early:
            await batch_of(early)
            heard = asyncio.create_task(record_of(early, "slot", 1, "decode"))
            with here.service.gateway.submit([LONG, SHORT]):
                await hold.reached.wait()
                with feed.watched(here.service, 0) as late:
                    first = await batch_of(late)
                    looks = {record[2]: record[3] for record in first["records"][:2]}
                    assert looks == {0: "prefill", 1: "ready"}
                    hold.let_go()
                    one = await record_of(late, "slot", 1, "decode")
                assert await heard == one


async def test_nothing_is_recorded_while_nobody_looks():
    feed = Feed(tick_s=0)
    async with world() as here:
        assert not feed.is_recording
        before = len(asyncio.all_tasks())
        with feed.watched(here.service, 0), feed.watched(here.service, 0):
            assert feed.is_recording
        assert not feed.is_recording
        await until(lambda: len(asyncio.all_tasks()) == before)


async def test_the_time_is_told_although_nothing_happens():
    async with world() as here:
        with Feed(tick_s=0).watched(here.service, 0) as viewer:
            first, second = await batch_of(viewer), await batch_of(viewer)
    assert second["records"] == []
    assert second["now_ns"] > first["now_ns"]


async def test_a_viewer_that_does_not_read_gets_a_gap_and_then_the_present():
    stands = 0

    def stand() -> Batch:
        nonlocal stands
        stands += 1
        return Batch(now_ns=stands, records=())

    viewer = Viewer(stand)
    assert json.loads(await anext(viewer)) == {"now_ns": 1, "records": []}
    for number in range(BATCHES_MAX):
        viewer.put(b"%d" % number)
    assert await anext(viewer) == b"0"
    for _ in range(2):  # one takes the place of what was read; the next finds none
        viewer.put(b"more")
    viewer.put(b"lost")
    assert json.loads(await anext(viewer)) == {"now_ns": 2, "records": [], "gap": True}
    viewer.put(b"news")
    assert await anext(viewer) == b"news"


async def test_viewers_end_with_the_service():
    async with world() as here:
        with Feed(tick_s=0).watched(here.service, 0) as viewer:
            here.service.shut_down()
            await here.service.ended()
            batches = [batch async for batch in viewer]
            assert len(batches) < BATCHES_MAX


async def test_no_more_than_so_many_may_watch():
    feed = Feed()
    async with world() as here:
        entered = [feed.watched(here.service, 0) for _ in range(VIEWERS_MAX)]
        for one in entered:
            one.__enter__()
        with pytest.raises(Crowded), feed.watched(here.service, 0):
            pass
        here.app.state.feed = feed
        async with client_of(here.app) as client:
            refusal = await client.get("/phase/events")
        assert refusal.status_code == 503
        assert str(VIEWERS_MAX) in refusal.json()["error"]["message"]
        for one in entered:
            one.__exit__(None, None, None)
        assert not feed.is_recording


async def test_a_fault_of_the_recorder_disturbs_nobody_but_viewers(monkeypatch):
    def fails(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(Recorder, "observe", fails)
    async with world() as here:
        with (
            Feed(tick_s=0).watched(here.service, 0) as viewer,
            here.service.gateway.submit([SHORT]) as call,
        ):
            assert [type(item) async for item in call.streams[0]]
            assert call.streams[0].outcome == "stop"
            assert [batch async for batch in viewer] == []


# --- over a socket --------------------------------------------------------------------------------


async def test_a_client_that_leaves_is_forgotten():
    async with listening(Storyteller()) as server:
        address = Address.parse(server.url)
        feed = server.app.state.feed
        async with Exchange(address, "GET", "/phase/events") as exchange:
            assert exchange.headers["content-type"] == "text/event-stream"
            async for event in exchange.events():
                assert json.loads(event.data)["head"]["slot_count"] == 2
                break
            assert feed.is_recording
        async with asyncio.timeout(10):
            for _ in itertools.count():
                if not feed.is_recording:
                    break
                await asyncio.sleep(0)


async def test_the_head_of_the_stream_can_be_asked_for():
    async with listening(Storyteller()) as server:
        address = Address.parse(server.url)
        async with asyncio.timeout(10), Exchange(address, "HEAD", "/phase/events") as exchange:
            assert exchange.headers["content-type"] == "text/event-stream"
            assert await exchange.body() == b""
        assert not server.app.state.feed.is_recording


async def test_top_shows_a_real_server(capsys):
    async with listening(Storyteller()) as server:
        await print_once(Address.parse(server.url), None)
    shown = capsys.readouterr().out
    assert "seated 0 of 2   KV pages 0 of 64" in shown
    assert "barrier-fair" in shown
