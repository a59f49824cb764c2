"""The shell: writing and reading traces, the loop's own cost, a round's hand-over, the start."""

import asyncio
import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from bench_core import MS, crowded
from harness import Samples, figure, per_call

from phaseloop.core.policy import PRESETS
from phaseloop.core.reduce import reduce
from phaseloop.core.state import State, initial
from phaseloop.core.vocabulary import (
    AnyEffect,
    AnyEvent,
    Effects,
    LaunchRound,
    Produced,
    Request,
    RequestCancelled,
    RoundCompleted,
    SeatRequest,
)
from phaseloop.engine.protocol import Content, Description, Outcome, Seated, limits_of
from phaseloop.runtime.clock import AsyncioClock
from phaseloop.runtime.digest import Fingerprint, core_digest
from phaseloop.runtime.gateway import Gateway, Stream, Submission
from phaseloop.runtime.loop import Stepper, run
from phaseloop.runtime.mailbox import Mailbox
from phaseloop.runtime.perform import Performer
from phaseloop.runtime.trace import Header, Recorded, TraceWriter, open_trace
from phaseloop.runtime.worker import ThreadWorker

EVENTS = 20_000
ROUND_NS = 5 * MS  # a short round: one token for four streams of a small model on two cores


@contextmanager
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "trace.jsonl"


def writer_of(out: BinaryIO, state: State) -> TraceWriter:
    header = Header(
        version="0", core=core_digest(), policy=state.policy, limits=state.limits, engine="bench"
    )
    return TraceWriter(out, header, state)


def step_of_a_round(slots: int) -> tuple[AnyEvent, State, State, Effects]:
    """One decode round of a full house, as the writer of a trace sees it."""
    before = crowded(slots)
    assert before.flight is not None
    event = RoundCompleted(
        at_ns=11_000 * MS,
        round_id=before.flight.round_id,
        results=(Produced(1),) * slots,
        duration_ns=MS,
    )
    after, effects = reduce(before, event)
    return event, before, after, effects


# --- traces ---------------------------------------------------------------------------------------


@figure("trace: append and flush to a file, 4 lanes", unit="µs", at_most=5)
def append_4() -> Samples:
    return appends(4)


@figure("trace: append and flush to a file, 64 lanes", unit="µs")
def append_64() -> Samples:
    return appends(64)


@figure("trace: share of a 5 ms round, 4 lanes", unit="%", at_most=2)
def share_of_a_round() -> Samples:
    return [100 * cost_us * 1e3 / ROUND_NS for cost_us in appends(4)]


def appends(slots: int) -> Samples:
    event, before, after, effects = step_of_a_round(slots)
    with scratch() as path, path.open("wb") as out:
        writer = writer_of(out, before)

        def append() -> None:
            writer.append(event, before, after, effects)
            writer.flush()

        return per_call(append, calls=EVENTS)


@figure("trace: decode and chain one event, 4 lanes", unit="µs", at_most=6)
def decode() -> Samples:
    event, before, after, effects = step_of_a_round(4)
    with scratch() as path:
        with path.open("wb") as out:
            writer = writer_of(out, before)
            for _ in range(EVENTS):
                writer.append(event, before, after, effects)
            writer.close("bench", 0)
        samples: list[float] = []
        for _ in range(10):
            with open_trace(path) as reader:
                fingerprint = Fingerprint(reader.header_line, before)
                start_ns = time.perf_counter_ns()
                for _, record in reader:
                    if isinstance(record, Recorded):
                        line, event = record.event_json, record.event
                        fingerprint.step(line, event, before, after, effects)
            samples.append((time.perf_counter_ns() - start_ns) / EVENTS / 1e3)
        return samples


# --- the loop -------------------------------------------------------------------------------------


@figure("loop: a step without trace, reducer excluded, 4 lanes", unit="µs")
def step_overhead() -> Samples:
    """What is left of a step when the event changes nothing: the loop and its deadline."""
    ignore: list[AnyEffect] = []
    stepper = Stepper(crowded(4), ignore.append)
    event = RequestCancelled(at_ns=11_000 * MS, request_id=10**6)
    state = stepper.state

    def step() -> None:
        stepper.deadline_ns()
        stepper.step(event)

    with_loop = per_call(step, calls=EVENTS)
    alone = sorted(per_call(lambda: reduce(state, event), calls=EVENTS))
    return [sample - alone[len(alone) // 2] for sample in with_loop]


class InstantEngine:
    """Computes nothing, and notes when each decode round began and ended."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self.spans_ns: list[tuple[int, int]] = []

    def describe(self) -> Description:
        return Description(
            name="instant",
            slot_count=self._slots,
            batch_tokens=4096,
            context_length=1 << 20,
            page_count=1 << 20,
        )

    def seat(self, seat: SeatRequest, content: Content) -> Seated:
        return Seated()

    def run(self, launch: LaunchRound) -> Outcome:
        begin_ns = time.perf_counter_ns()
        results = tuple(Produced(1 if lane.outputs else 0) for lane in launch.lanes)
        tokens = tuple((7,) if lane.outputs else () for lane in launch.lanes)
        outcome = Outcome(results, tokens)
        if launch.kind == "decode":
            self.spans_ns.append((begin_ns, time.perf_counter_ns()))
        return outcome

    def abort(self, round_id: int) -> None: ...
    def release(self, slot: int, keep: int, version: int) -> None: ...
    def drop(self, request_id: int, choice: int) -> None: ...


@figure("hand-over: a round's end to the next one's start, 4 slots", unit="ms", at_most=0.3)
def hand_over_4() -> Samples:
    return asyncio.run(hand_overs(4, rounds=2000))


@figure("hand-over: a round's end to the next one's start, 64 slots", unit="ms", at_most=1.5)
def hand_over_64() -> Samples:
    return asyncio.run(hand_overs(64, rounds=1000))


async def hand_overs(slots: int, rounds: int) -> Samples:
    """The whole shell, with a trace and a client per slot that reads every token."""
    engine, clock = InstantEngine(slots), AsyncioClock()
    limits = limits_of(engine.describe())
    mailbox = Mailbox(clock)
    gateway = Gateway(limits, clock, mailbox, lambda: 0)
    worker = ThreadWorker(engine, clock, mailbox.post)
    state = initial(limits, PRESETS["barrier-fair"])
    with scratch() as path, path.open("wb") as out:
        stepper = Stepper(state, Performer(worker, gateway), writer_of(out, state))
        running = asyncio.create_task(run(stepper, mailbox))
        wanted = Submission(Request(0, 10, output_limit=rounds))
        with gateway.submit([wanted] * slots) as call:
            await asyncio.gather(*(read(stream) for stream in call.streams))
        running.cancel()
        await worker.close()
        stepper.close("bench", 0)
    spans = engine.spans_ns
    return [(following[0] - ended[1]) / MS for ended, following in itertools.pairwise(spans)]


async def read(stream: Stream) -> None:
    async for _ in stream:
        pass


# --- the start ------------------------------------------------------------------------------------


@figure("start: phaseloop --version", unit="ms", at_most=200)
def start() -> Samples:
    def version() -> None:
        subprocess.run(
            [sys.executable, "-m", "phaseloop", "--version"], check=True, capture_output=True
        )

    return [sample / 1e3 for sample in per_call(version, calls=15, warm_up=1)]


@figure("start: importing the whole shell", unit="ms")
def importing() -> Samples:
    def shell() -> None:
        program = "import phaseloop.runtime.perform, phaseloop.runtime.loop"
        subprocess.run([sys.executable, "-c", program], check=True)

    return [sample / 1e3 for sample in per_call(shell, calls=15, warm_up=1)]
