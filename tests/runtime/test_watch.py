"""Goal: every request's time is told apart as it was spent, and the counters add up.

Method: the shell in virtual time with rounds of one millisecond, so that each span is arithmetic.
"""

from scripted import MS, Shell, run_virtually

from phaseloop.core.vocabulary import Request
from phaseloop.runtime.gateway import Begun, Delivered, Ended, Progress
from phaseloop.runtime.timing import Timing


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
