"""Goal: every client gets all its tokens and one end, and no client can hold up or harm another.

Method: the whole shell in virtual time (gateway, mailbox, loop, scripted engine), with clients that
read, stall, leave and are cancelled at every moment of a request's life.
"""

import asyncio
from collections.abc import Sequence

import pytest
from msgspec.structs import replace
from scripted import MS, ScriptedEngine, Shell, run_virtually

from phaseloop.core.vocabulary import (
    ClientResumed,
    ClientStalled,
    FinishRequest,
    Request,
    RequestArrived,
    RequestCancelled,
    SeatRequest,
    StopMatched,
)
from phaseloop.engine.protocol import Content
from phaseloop.runtime.gateway import Delivered, Ended, Stream, Submission

PROMPT = Request(0, 100)  # two rounds of a scripted engine


async def read(stream: Stream) -> list[Delivered | Ended]:
    return [item async for item in stream]


def ids_of(items: Sequence[Delivered | Ended], choice: int = 0) -> list[int]:
    delivered = [i for i in items if isinstance(i, Delivered) and i.choice == choice]
    assert all(item.count == len(item.ids) for item in delivered)
    return [token for item in delivered for token in item.ids]


# --- a call and its streams -----------------------------------------------------------------------


def test_a_client_reads_its_tokens_and_then_the_end():
    async def main():
        shell = Shell()
        with shell.submit(PROMPT) as call:
            (stream,) = call.streams
            items = await read(stream)
        await shell.shut_down()
        return items, stream.outcome, shell.count(RequestCancelled)

    items, outcome, cancels = run_virtually(main())
    assert items == [
        Delivered(0, 1, (0,)),
        Delivered(0, 1, (1,)),
        Delivered(0, 1, (2,)),
        Ended(0, "stop"),
    ]
    assert (outcome, cancels) == ("stop", 0)


def test_ids_rise_over_calls_and_time_is_stamped():
    async def main():
        shell = Shell()
        calls = [shell.submit(PROMPT, PROMPT)]
        await shell.schedule.until(2 * MS)
        calls.append(shell.submit(PROMPT))
        for call in calls:
            for stream in call.streams:
                await read(stream)
        await shell.shut_down()
        return [e for e in shell.events if isinstance(e, RequestArrived)]

    first, second = run_virtually(main())
    assert (first.at_ns, second.at_ns) == (0, 2 * MS)
    assert [r.request_id for r in first.requests + second.requests] == [0, 1, 2]


def test_the_engine_is_told_tokens_and_seed_and_the_reducer_is_not():
    engine = ScriptedEngine()

    async def main():
        shell = Shell(engine)
        given = Submission(Request(0, 3), tokens=(5, 6, 7), seed=42)
        drawn = Submission(Request(0, 2), tokens=(8, 9))
        with shell.gateway.submit([given, drawn]) as call:
            for stream in call.streams:
                await read(stream)
        await shell.shut_down()

    run_virtually(main())
    assert [content for _, content in engine.seats] == [
        Content((5, 6, 7), seed=42),
        Content((8, 9), seed=700),
    ]


def test_choices_share_a_stream_and_keep_their_order():
    async def main():
        shell = Shell()
        with shell.submit(replace(PROMPT, choices=2)) as call:
            items = await read(call.streams[0])
        await shell.shut_down()
        return items, call.streams[0].outcome

    items, outcome = run_virtually(main())
    for choice in (0, 1):
        assert ids_of(items, choice) == [0, 1, 2]
        assert [i for i in items if i.choice == choice][-1] == Ended(choice, "stop")
    assert outcome == "stop"


def test_a_call_is_refused_whole():
    async def main():
        shell = Shell(queue_length_max=2)
        with shell.submit(PROMPT, PROMPT, PROMPT) as call:
            items = [await read(stream) for stream in call.streams]
        await shell.shut_down()
        return items, [stream.outcome for stream in call.streams], shell.count(RequestCancelled)

    items, outcomes, cancels = run_virtually(main())
    assert items == [[], [], []]
    assert outcomes == ["queue_full"] * 3
    assert cancels == 0


def test_a_matched_stop_ends_its_choice():
    async def main():
        shell = Shell(ScriptedEngine(length=1000))
        with shell.submit(PROMPT) as call:
            (stream,) = call.streams
            seen = 0
            async for item in stream:
                seen += isinstance(item, Delivered)
                if seen == 4:
                    stream.stop_matched(0)
        stream.stop_matched(0)  # too late, and no event
        await shell.shut_down()
        return seen, stream.outcome, shell.count(StopMatched)

    seen, outcome, stops = run_virtually(main())
    assert outcome == "stop"
    assert seen in (4, 5), "the round in flight may still deliver"
    assert stops >= 1


# --- leaving --------------------------------------------------------------------------------------


def role_of(shell: Shell, request_id: int) -> str:
    state = shell.stepper.state
    if request_id in state.queue:
        return "queued"
    for s in state.slots:
        if s is not None and s.request.request_id == request_id:
            return "stalled" if s.stalled_until_ns is not None else s.role
    return "gone"


async def leave_at(at_ns: int) -> tuple[str, bool]:
    """Two clients read to the end; the last to arrive, or the first, leaves at `at_ns`."""
    shell = Shell(ScriptedEngine(length=6))
    calls = [shell.submit(PROMPT), shell.submit(replace(PROMPT, prompt_length=250))]
    await shell.schedule.until(MS // 4)
    calls.append(shell.submit(PROMPT))
    leaver = calls[at_ns // (MS // 2) % 3].streams[0]
    others = [call.streams[0] for call in calls if call.streams[0] is not leaver]
    reading = [asyncio.create_task(read(stream)) for stream in (leaver, *others)]
    await shell.schedule.until(at_ns)
    role, had_ended = role_of(shell, leaver.request.request_id), leaver.outcome is not None
    leaver.close()
    leaver.close()  # again, as a context manager does after an explicit close
    for stream, task in zip(others, reading[1:], strict=True):
        base = 1000 * stream.request.request_id
        assert ids_of(await task) == [base + n for n in range(6)], "nobody else notices"
        assert stream.outcome == "stop"
    await reading[0]
    await shell.shut_down()
    assert shell.count(RequestCancelled) == (not had_ended)
    outcome = {f.request_id: f.reason for f in shell.finished}[leaver.request.request_id]
    return role, had_ended == (outcome == "stop")


def test_a_client_may_leave_at_any_moment():
    roles = set()
    for half_ms in range(1, 60):
        # A little after, as rounds end on the half millisecond.
        role, right = run_virtually(leave_at(half_ms * MS // 2 + 1000))
        assert right, f"at {half_ms / 2} ms, {role}"
        roles.add(role)
    assert roles >= {"queued", "prefilling", "ready", "generating", "gone"}


def test_a_client_may_leave_while_its_seat_is_prepared():
    engine = ScriptedEngine()

    async def main():
        shell = Shell(engine)
        call = shell.submit(PROMPT)

        def leave(seat: SeatRequest) -> None:
            assert role_of(shell, 0) == "seating"
            call.close()

        engine.on_seat = leave
        await read(call.streams[0])
        await shell.shut_down()
        return shell.finished, shell.stepper.state.slots

    finished, slots = run_virtually(main())
    assert finished == [FinishRequest(0, "cancelled")]
    assert slots == (None, None)


def test_a_cancelled_reader_cancels_its_request_without_awaiting():
    async def main():
        shell = Shell(ScriptedEngine(length=1000))
        posted = []

        async def client() -> None:
            with shell.submit(PROMPT) as call:
                async for _ in call.streams[0]:
                    pass
            posted.append("left")

        task = asyncio.create_task(client())
        await shell.schedule.until(10 * MS)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await shell.schedule.until(20 * MS)
        finished = list(shell.finished)
        await shell.shut_down()
        return finished, posted, len(shell.engine.launches)

    finished, posted, launches = run_virtually(main())
    assert finished == [FinishRequest(0, "cancelled")]
    assert posted == []
    assert launches < 15, "the engine was not kept busy for nobody"


def test_a_failing_reader_cancels_its_request():
    async def main():
        shell = Shell(ScriptedEngine(length=1000))
        with pytest.raises(ZeroDivisionError), shell.submit(PROMPT) as call:
            async for _ in call.streams[0]:
                raise ZeroDivisionError
        await shell.shut_down()
        return shell.finished

    assert run_virtually(main()) == [FinishRequest(0, "cancelled")]


# --- stalling -------------------------------------------------------------------------------------


def test_a_client_that_does_not_read_is_parked_and_goes_on_when_it_reads():
    async def main():
        shell = Shell(ScriptedEngine(length=50), outbox_mark=8)
        slow, quick = shell.submit(PROMPT), shell.submit(PROMPT)
        quick_items = await read(quick.streams[0])
        await shell.schedule.until(200 * MS)
        parked = role_of(shell, 0), slow.streams[0]._waiting_tokens
        slow_items = await read(slow.streams[0])
        await shell.shut_down()
        return parked, quick_items, slow_items, shell

    parked, quick_items, slow_items, shell = run_virtually(main())
    assert parked == ("stalled", 9), "the mark, and the round that was already running"
    assert ids_of(quick_items) == [1000 + n for n in range(50)]
    assert ids_of(slow_items) == list(range(50))
    assert shell.count(ClientStalled) >= 1
    assert shell.count(ClientStalled) - shell.count(ClientResumed) in (0, 1)


@pytest.mark.parametrize("outbox_mark", [1, 2, 5])
@pytest.mark.parametrize("pause_ms", [1, 3])
@pytest.mark.parametrize("draft_tokens", [0, 3])
def test_an_outbox_never_holds_more_than_its_bound(outbox_mark, pause_ms, draft_tokens):
    """Stream.put asserts the bound at every delivery."""

    async def main():
        shell = Shell(ScriptedEngine(length=30), outbox_mark=outbox_mark, draft_tokens=draft_tokens)
        with shell.submit(replace(PROMPT, choices=2)) as call:
            items = []
            async for item in call.streams[0]:
                items.append(item)
                await shell.schedule.until(shell.schedule.now_ns() + pause_ms * MS)
        await shell.shut_down()
        return items

    items = run_virtually(main())
    for choice in (0, 1):
        assert ids_of(items, choice) == list(range(30))


def test_a_client_that_never_reads_is_ended():
    async def main():
        shell = Shell(ScriptedEngine(length=1000), outbox_mark=4, client_stall_ns=100 * MS)
        with shell.submit(PROMPT) as call:
            await shell.schedule.until(300 * MS)
            ended = call.streams[0].outcome
            items = await read(call.streams[0])
        await shell.shut_down()
        return ended, items, shell.count(RequestCancelled)

    ended, items, cancels = run_virtually(main())
    assert (ended, cancels) == ("stalled", 0)
    assert ids_of(items) == list(range(5)), "what was delivered can still be read"
    assert items[-1] == Ended(0, "stalled")


# --- the end of the loop --------------------------------------------------------------------------


def test_nobody_waits_for_a_loop_that_has_failed():
    async def main():
        shell = Shell(ScriptedEngine(length=1000))
        call = shell.submit(PROMPT)
        reading = asyncio.create_task(read(call.streams[0]))
        await shell.schedule.until(10 * MS)
        shell.running.cancel()
        shell.gateway.close("engine_lost")
        await reading
        late = shell.submit(PROMPT)
        items = await read(late.streams[0])
        return call.streams[0].outcome, items, late.streams[0].outcome

    assert run_virtually(main()) == ("engine_lost", [], "engine_lost")
