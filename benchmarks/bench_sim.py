"""The simulator: events per second with the trace written and every launch checked, and its memory.

What is measured is what `phaseloop simulate WORKLOAD --trace FILE` does, from reading the workload
to the summary, without the start of the process.
"""

import os
import tempfile
import time
from pathlib import Path

from harness import Samples, figure
from msgspec.structs import replace

from phaseloop.core.policy import DEFAULT, PRESETS
from phaseloop.engine.protocol import limits_of
from phaseloop.engine.sim import describe
from phaseloop.engine.sim_presets import V100
from phaseloop.sim.arrivals import arrivals_of
from phaseloop.sim.distributions import Uniform
from phaseloop.sim.metrics import Summary
from phaseloop.sim.workload import Arrivals, Poisson, Stream, Workload, read_workload
from phaseloop.sim.world import Progress, Scene, simulate

MILLION = Path(__file__).parent.parent / "fixtures" / "workloads" / "million.toml"
RUNS = 5
CROWD = Workload(
    "crowd",
    (
        Stream(
            name="crowd",
            arrivals=Arrivals(Poisson(4.0), 1200),
            prompt=Uniform(50, 400),
            output=Uniform(50, 300),
        ),
    ),
)


def run(
    workload: Workload, slots: int, policy: str, progress: Progress | None = None
) -> tuple[Summary, float]:
    """The summary, and the seconds it took."""
    limits = replace(limits_of(describe(V100)), slot_count=slots)
    scene = Scene(limits=limits, policy=PRESETS[policy], model=V100)
    with tempfile.TemporaryDirectory() as folder:
        start_ns = time.perf_counter_ns()
        with (Path(folder) / "trace.jsonl").open("wb") as out:
            summary = simulate(scene, arrivals_of(workload, 0), trace=out, progress=progress)
        return summary, (time.perf_counter_ns() - start_ns) / 1e9


def rates(workload: Workload, slots: int, policy: str) -> Samples:
    samples: list[float] = []
    for _ in range(RUNS):
        summary, elapsed_s = run(workload, slots, policy)
        samples.append(summary.events / elapsed_s)
    return samples


@figure("simulate: 4 slots", unit="events/s", at_least=20_000)
def four_slots() -> Samples:
    return rates(replace(read_workload(MILLION), count=500), 4, DEFAULT)


@figure("simulate: 4 slots, mixed", unit="events/s")
def four_slots_mixed() -> Samples:
    return rates(replace(read_workload(MILLION), count=500), 4, "mixed")


@figure("simulate: 64 slots", unit="events/s", at_least=8_000)
def sixty_four_slots() -> Samples:
    return rates(CROWD, 64, DEFAULT)


@figure("simulate: 64 slots, mixed", unit="events/s")
def sixty_four_slots_mixed() -> Samples:
    return rates(CROWD, 64, "mixed")


@figure("simulate: a million events", unit="s", at_most=75)
def a_million_events() -> Samples:
    summary, elapsed_s = run(read_workload(MILLION), 4, DEFAULT)
    assert summary.events > 900_000
    return [elapsed_s]


@figure("simulate: memory grown from event 100,000 to 1,000,000", unit="MiB", at_most=8)
def memory_grown() -> Samples:
    grown: list[int] = []

    def look(events: int, now_ns: int) -> None:
        if events >= 100_000:
            grown.append(resident_bytes())

    run(read_workload(MILLION), 4, DEFAULT, look)
    return [(max(grown) - grown[0]) / (1 << 20)]


def resident_bytes() -> int:
    """Of this process, as Linux has it."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
