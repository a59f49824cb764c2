"""Replay: how many events a second it verifies, and whether its memory stays flat."""

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from harness import Samples, figure

from phaseloop.core.policy import PRESETS
from phaseloop.core.reduce import reduce
from phaseloop.core.state import Limits, State, initial
from phaseloop.core.vocabulary import (
    AnyEffect,
    AnyEvent,
    Effects,
    FinishRequest,
    LaunchRound,
    Produced,
    Request,
    RequestArrived,
    RequestSeated,
    RoundCompleted,
    SeatRequest,
)
from phaseloop.runtime.digest import core_digest
from phaseloop.runtime.trace import Header, TraceWriter, open_trace
from phaseloop.sim.metrics import Collector
from phaseloop.sim.replay import Fold, Step
from phaseloop.sim.replay_tally import Tally

MS = 1_000_000
EVENTS = 30_000
RUNS = 5
SETTLED_EVENTS = 100_000  # by then every buffer and cache has its size


@contextmanager
def recorded(slots: int, events: int, policy: str = "barrier-fair") -> Iterator[Path]:
    """A trace of so many clients, each of which asks again when it has its answer."""
    limits = Limits(
        slot_count=slots, batch_tokens=2048, context_length=32_768, page_count=64 * slots
    )
    state = initial(limits, PRESETS[policy])
    header = Header(
        version="0", core=core_digest(), policy=state.policy, limits=limits, engine="bench"
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        with path.open("wb") as out:
            writer = TraceWriter(out, header, state)
            run(state, writer, slots, events)
            writer.close("done", 0)
        yield path


def run(state: State, writer: TraceWriter, clients: int, events: int) -> None:
    ids = count()
    due = [ask(next(ids), 0) for _ in range(clients)]
    for _ in range(events):
        event = due.pop(0)
        after, effects = reduce(state, event)
        writer.append(event, state, after, effects)
        state = after
        due += answers(effects, event.at_ns)
        due += [ask(next(ids), event.at_ns) for e in effects if isinstance(e, FinishRequest)]
        due.sort(key=lambda one: one.at_ns)


def ask(request_id: int, at_ns: int) -> RequestArrived:
    """Lengths that spread, so that answers do not end together."""
    prompt, output = 100 + request_id * 37 % 900, 60 + request_id * 53 % 90
    return RequestArrived(at_ns=at_ns, requests=(Request(request_id, prompt, output_limit=output),))


def answers(effects: Effects, now_ns: int) -> list[AnyEvent]:
    return [event for effect in effects if (event := answer(effect, now_ns)) is not None]


def answer(effect: AnyEffect, now_ns: int) -> AnyEvent | None:
    if isinstance(effect, SeatRequest):
        return RequestSeated(
            at_ns=now_ns, request_id=effect.request_id, choice=effect.choice, slot=effect.slot
        )
    if isinstance(effect, LaunchRound):
        length_ns = 20 * MS if effect.kind == "decode" else 200 * MS
        results = tuple(Produced(1 if lane.outputs else 0) for lane in effect.lanes)
        return RoundCompleted(
            at_ns=now_ns + length_ns,
            round_id=effect.round_id,
            results=results,
            duration_ns=length_ns,
        )
    return None


def rate(path: Path) -> float:
    """Events per second of what `phaseloop replay TRACE` does."""
    start_ns = time.perf_counter_ns()
    with open_trace(path) as reader:
        fold, tally = Fold(reader), Tally()
        for step in fold:
            tally.see(step)
    assert fold.verdict().exit_code == 0
    return fold.events / ((time.perf_counter_ns() - start_ns) / 1e9)


@figure("replay: verify, 4 slots", unit="events/s", at_least=50_000)
def verify_4() -> Samples:
    with recorded(4, EVENTS) as path:
        return [rate(path) for _ in range(RUNS)]


@figure("replay: verify, 64 slots", unit="events/s", at_least=8_000)
def verify_64() -> Samples:
    with recorded(64, EVENTS // 4) as path:
        return [rate(path) for _ in range(RUNS)]


@figure("replay: verify with --stats, 4 slots", unit="events/s")
def verify_with_stats() -> Samples:
    samples: list[float] = []
    with recorded(4, EVENTS) as path:
        for _ in range(RUNS):
            start_ns = time.perf_counter_ns()
            with open_trace(path) as reader:
                header = reader.header
                fold, tally = Fold(reader), Tally()
                collector = Collector(header.limits, header.policy)
                for step in fold:
                    tally.see(step)
                    collector.observe(step.event, step.before, step.after, step.effects)
            samples.append(fold.events / ((time.perf_counter_ns() - start_ns) / 1e9))
    return samples


@figure("replay: memory grown from event 100,000 to 1,000,000", unit="MiB", at_most=8)
def memory_grown() -> Samples:
    settled = 0
    with recorded(4, 10 * SETTLED_EVENTS) as path, open_trace(path) as reader:
        tally = Tally()
        step: Step | None = None
        for step in Fold(reader):
            tally.see(step)
            if step.seq == SETTLED_EVENTS:
                settled = resident_bytes()
        assert step is not None and step.seq == 10 * SETTLED_EVENTS - 1
        return [(resident_bytes() - settled) / (1 << 20)]


def resident_bytes() -> int:
    """Of this process, as Linux has it."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
