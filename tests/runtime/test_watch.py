"""Goal: every request's time is told apart as it was spent, and the counters add up.

Method: the shell in virtual time with rounds of one millisecond, so that each span is arithmetic.
"""

import pytest
from msgspec.structs import replace
from scripted import DESCRIPTION, MS, ScriptedEngine, Shell, run_virtually

from phaseloop.core.policy import PRESETS
from phaseloop.core.state import Flight, Pending, Role, Sequence, initial
from phaseloop.core.vocabulary import Failed, Lane, Produced, Request, RoundCompleted
from phaseloop.engine.protocol import Seated, limits_of
from phaseloop.runtime.clock import VirtualClock
from phaseloop.runtime.gateway import Begun, Delivered, Ended, Gateway, Progress
from phaseloop.runtime.mailbox import Mailbox
from phaseloop.runtime.timing import Timing
from phaseloop.runtime.watch import Watch

ROLES: tuple[Role, ...] = ("generating", "prefilling")


async def read(stream) -> list[type]:
    return [type(item) async for item in stream]


def spans(timing: Timing) -> dict[str, int]:
    """In milliseconds."""
    return {
        "queue": timing.queue_ns() / MS,
        "prefill": timing.prefill_ns() / MS,
        "prefill_work": timing.prefill_work_ns / MS,
        "barrier": timing.barrier_ns() / MS,
        "decode": timing.decode_ns() / MS,
        "decode_work": timing.decode_work_ns / MS,
    }


def test_a_cohort_and_a_late_arrival():
    """64 rows a round: 44 + 20, then 56; both generate from 2 ms to 6 ms; then the third's turn."""

    async def main():
        shell = Shell(watched=True)
        with shell.submit(Request(0, 100), Request(0, 20)) as cohort:
            await shell.schedule.until(5 * MS // 2)
            with shell.submit(Request(0, 10)) as late:
                streams = (*cohort.streams, *late.streams)
                items = [await read(stream) for stream in streams]
        await shell.shut_down()
        return items, [stream.timing for stream in streams], shell.watch.counters

    items, (long, short, late), counters = run_virtually(main())
    assert spans(long) == {
        "queue": 0, "prefill": 2, "prefill_work": 2, "barrier": 0, "decode": 4, "decode_work": 4
    }  # fmt: skip
    assert spans(short) == {
        "queue": 0, "prefill": 1, "prefill_work": 1, "barrier": 1, "decode": 4, "decode_work": 4
    }  # fmt: skip
    assert spans(late) == {
        "queue": 3.5, "prefill": 1, "prefill_work": 1, "barrier": 0, "decode": 4, "decode_work": 4
    }  # fmt: skip
    assert items[0] == [Begun, Progress, Delivered, Delivered, Delivered, Ended], (
        "nobody read between the rounds, so the two reports of progress became one"
    )
    assert (long.processed, short.processed, late.processed) == (100, 20, 10)
    firsts = [timing.first_ns - timing.opened_ns for timing in (long, short, late)]
    assert firsts == [MS, MS, MS], "each first token took one round, the sample"
    assert (counters.prompt_tokens, counters.prefill_rounds) == (130, 3)
    assert (counters.generated_tokens, counters.decode_rounds, counters.decode_lanes) == (9, 6, 9)
    assert (counters.prefill_ns, counters.decode_ns) == (3 * MS, 8 * MS)
    assert counters.tokens_max == 103, "the longest prompt and its three tokens"
    assert counters.ends == {"stop": 3}


def test_a_request_that_never_got_a_seat_waited_until_its_end():
    async def main():
        shell = Shell(watched=True)
        with shell.submit(Request(0, 100), Request(0, 100)) as first:
            with shell.submit(Request(0, 8, queue_wait_ns_max=MS)) as hurried:
                (stream,) = hurried.streams
                items = await read(stream)
            for other in first.streams:
                await read(other)
        await shell.shut_down()
        return items, stream

    items, stream = run_virtually(main())
    assert (items, stream.outcome) == ([], "queue_timeout"), "no Begun: a plain refusal is possible"
    assert spans(stream.timing)["queue"] == 1
    assert spans(stream.timing)["decode"] == 0


def test_who_leaves_has_waited_until_then():
    async def main():
        shell = Shell(watched=True)
        with shell.submit(Request(0, 100)) as call:
            (stream,) = call.streams
            await anext(stream)
            await shell.schedule.until(5 * MS // 2)
        left = spans(stream.timing)
        await shell.shut_down()
        return left

    assert run_virtually(main()) == {
        "queue": 0, "prefill": 2, "prefill_work": 2, "barrier": 0, "decode": 0.5, "decode_work": 0
    }  # fmt: skip


def test_choices_share_one_prompt_and_are_timed_from_its_end():
    """One round computes it, one copies it, then both draw: tokens in 2..6 ms."""

    async def main():
        shell = Shell(watched=True)
        with shell.submit(Request(0, 50, choices=2)) as call:
            (stream,) = call.streams
            await read(stream)
        await shell.shut_down()
        return stream.timing, shell.watch.counters

    timing, counters = run_virtually(main())
    assert sorted(timing.slots) == [0, 1]
    assert spans(timing) == {
        "queue": 0, "prefill": 1, "prefill_work": 2, "barrier": 1, "decode": 4, "decode_work": 4
    }  # fmt: skip
    assert counters.prompt_tokens == 50


class StoringEngine(ScriptedEngine):
    """Has 40 tokens of every prompt elsewhere, unless it `fails` to bring them."""

    fails = False

    def seat(self, seat, content):
        return Seated(40, restore=True)

    def _lane(self, lane):
        is_restore = self.launches[-1].kind == "restore"
        return (Failed("gone"), ()) if is_restore and self.fails else super()._lane(lane)


@pytest.mark.parametrize(("fails", "cached"), [(False, 40), (True, 0)])
def test_a_stored_beginning_counts_once_it_is_back(fails, cached):
    """A prompt of 100: what is found and what is computed are all of it, either way."""

    async def main():
        engine = StoringEngine()
        engine.fails = fails
        shell = Shell(engine, watched=True)
        with shell.submit(Request(0, 100)) as call:
            await read(call.streams[0])
        await shell.shut_down()
        return call.streams[0].timing, shell.watch.counters

    timing, counters = run_virtually(main())
    assert (timing.cached, timing.processed) == (cached, 100 - cached)
    assert (counters.prompt_tokens_cached, counters.prompt_tokens) == (cached, 100 - cached)


def test_drafts_are_counted_as_they_are_verified():
    """A round of two lanes with three drafts each: of one lane two are accepted, of the other none.

    A third lane had no drafts, and a fourth failed: these say nothing about the drafts' quality.
    """
    state = initial(limits_of(DESCRIPTION), PRESETS["barrier-fair"])
    lanes = tuple(Lane(slot, slot, 0, 8, 1 if slot == 2 else 4, 4) for slot in range(4))
    before = replace(state, slots=(None,) * 4, flight=Flight(7, "decode", lanes))
    results = (Produced(3), Produced(1), Produced(1), Failed("a bad row"))
    watch = Watch(Gateway(state.limits, VirtualClock(), Mailbox(VirtualClock()), lambda: 0))
    event = RoundCompleted(at_ns=0, round_id=7, results=results, duration_ns=MS)
    watch.observe(event, before, before, ())
    counters = watch.counters
    assert (counters.drafts, counters.drafted_tokens, counters.accepted_tokens) == (2, 6, 2)


def test_an_engine_may_say_that_it_drafted_less_than_there_was_room_for():
    """Of three drafts two hold; of one, which an end token follows, one; a lane made none."""
    state = initial(limits_of(DESCRIPTION), PRESETS["mixed"])
    lanes = tuple(Lane(slot, slot, 0, 8, 6, 6) for slot in range(3))
    lanes += (Lane(3, 3, 0, 0, 60, 1),)  # a prompt's rows are no drafts
    slots = (None, None, None, seated(Pending(Request(3, 100), 0), "prefilling"))
    before = replace(state, slots=slots, flight=Flight(7, "mixed", lanes))
    watch = Watch(Gateway(state.limits, VirtualClock(), Mailbox(VirtualClock()), lambda: 0))
    results = (Produced(3), Produced(1, finish=True), Produced(1), Produced(1))
    event = RoundCompleted(
        at_ns=0, round_id=7, results=results, duration_ns=MS, drafted=(3, 1, 0, 0)
    )
    watch.observe(event, before, before, ())
    counters = watch.counters
    assert (counters.drafts, counters.drafted_tokens, counters.accepted_tokens) == (2, 4, 3)
    assert counters.accepted_by_place == {0: 2, 1: 1}


def test_a_mixed_round_spends_its_time_on_both():
    state = initial(limits_of(DESCRIPTION), PRESETS["mixed"])
    lanes = (Lane(0, 0, 0, 9, 1, 1), Lane(1, 1, 0, 0, 60, 0))
    arrived = [Pending(Request(n, length), 0) for n, length in enumerate((8, 100))]
    seats = tuple(seated(one, role) for one, role in zip(arrived, ROLES, strict=True))
    before = replace(state, slots=seats, flight=Flight(7, "mixed", lanes))
    watch = Watch(Gateway(state.limits, VirtualClock(), Mailbox(VirtualClock()), lambda: 0))
    event = RoundCompleted(at_ns=0, round_id=7, results=(Produced(1), Produced()), duration_ns=MS)
    watch.observe(event, before, before, ())
    counters = watch.counters
    assert (counters.prefill_ns, counters.decode_ns) == (MS, MS)
    assert (counters.prompt_tokens, counters.decode_lanes, counters.mixed_rounds) == (60, 1, 1)


def seated(pending: Pending, role: Role) -> Sequence:
    return Sequence(
        pending.request,
        choice=0,
        ticket=0,
        arrived_ns=0,
        seated_ns=0,
        group=(0, "completion"),
        role=role,
        length=9 if role == "generating" else 0,
        cached=0,
        produced=1 if role == "generating" else 0,
        output_limit=None,
        pages=1,
    )
