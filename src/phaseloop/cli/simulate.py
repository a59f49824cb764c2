"""`phaseloop simulate`: run a workload against one or more policies in virtual time."""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from phaseloop.core.invariants import Violation
from phaseloop.core.vocabulary import Policy
from phaseloop.engine.sim_fields import SettingError
from phaseloop.engine.sim_file import find_engine
from phaseloop.runtime.output import create
from phaseloop.runtime.trace import TraceError
from phaseloop.sim.arrivals import Arrival, arrivals_of
from phaseloop.sim.fit import FitError
from phaseloop.sim.metrics import Summary
from phaseloop.sim.workload import Workload, read_workload
from phaseloop.sim.world import Scene, simulate

from .errors import UserError, some_path
from .simulate_fit import fit
from .simulate_options import (
    add_options,
    check_options,
    faults_from,
    limits_from,
    model_from,
    policies_from,
    refuse_overwriting,
)
from .simulate_progress import ProgressBar
from .simulate_report import engine_lines, json_of, print_table

HELP = "run a workload against a policy in virtual time, and measure it"
EXIT_BROKEN = 1
DESCRIPTION = """\
Runs the requests of a workload through the scheduler that serves, in virtual time, on an engine
that says how long each round would take.  The same arguments give the same run, byte for byte.

What is measured (percentiles are nearest-rank: each is a value that occurred):
  prefill_makespan_s    from the launch of the first prompt round to the end of the last prompt
  makespan_s            from the first arrival to the end of the last request
  prefill_tokens_per_s  prompt tokens computed, per second of the rounds that carried any
  decode_tokens_per_s   tokens delivered, per second of the rounds that generated any
  tokens_per_s          tokens delivered, per second of makespan
  ttft_s                from a request's arrival to its first token
  gap_s                 from one delivery of tokens to the next, per choice
  queue_wait_s          from arrival to a seat
  prefill_wait_s        from the seat to the prompt's end, less the rounds that carried its rows
  barrier_wait_s        from the prompt's end to the round that draws the first token
  decode_occupancy      generating lanes / slots, in the rounds that generated, by their time
A wait that is still open when a run is cut counts with its length so far."""
EPILOG = """\
WHEN is a round (120), its lane (120.2), rounds (100-109), a time (12.5s), a stretch of time
(10s-20s) or a chance per round (0.1%).  How workloads are written: see the comments of those in
fixtures/workloads, and the module phaseloop.sim.workload."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    parser.add_argument("workload", type=some_path, nargs="?", help="a TOML file")
    add_options(parser)


def run(args: Namespace) -> int:
    """Raises UserError, which says what is wrong and carries the exit code."""
    try:
        check_options(args)
        if args.list_engines:
            sys.stdout.write("\n".join(engine_lines()) + "\n")
            return 0
        if args.fit is not None:
            return fit(args)
        return measure(args)
    except (SettingError, TraceError) as error:
        raise UserError(str(error)) from None
    except FitError as error:
        raise UserError(f"{args.fit}: {error}") from None
    except Violation as error:
        raise UserError(f"the scheduler broke a promise: {error}", EXIT_BROKEN) from None
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UserError(f"{error.filename or 'output'}: {error.strerror or error}") from None


def measure(args: Namespace) -> int:
    workload = read_workload(args.workload)
    model = model_from(args, find_engine(args.engine))
    seed = workload.seed if args.seed is None else args.seed
    scenes = [
        Scene(
            limits=limits_from(args, model),
            policy=policy,
            model=model,
            seed=seed,
            cut_ns=workload.cut_ns,
        )
        for policy in policies_from(args)
    ]
    if args.trace is not None:
        inputs = {"the workload": args.workload, "the engine's file": Path(args.engine)}
        for scene in scenes:
            path = trace_path(args.trace, scene.policy, len(scenes))
            refuse_overwriting("--trace", path, inputs)
    summaries = [measure_one(args, workload, scene, len(scenes)) for scene in scenes]
    if args.json:
        sys.stdout.write(json_of(summaries, scenes[0], workload) + "\n")
    else:
        print_table(summaries, scenes[0], workload)
    return 0


def measure_one(args: Namespace, workload: Workload, scene: Scene, scene_count: int) -> Summary:
    arrivals = arrivals_of(workload, scene.seed)
    if args.max_queue_ms:
        arrivals = impatient(arrivals, args.max_queue_ms * 1_000_000)
    with ProgressBar(workload, scene.policy.name) as bar:
        arrivals = bar.counted(arrivals)
        faults = faults_from(args)
        if args.trace is None:
            return simulate(scene, arrivals, faults=faults, progress=bar.update)
        path = trace_path(args.trace, scene.policy, scene_count)
        with create(path) as trace:
            return simulate(scene, arrivals, faults=faults, trace=trace, progress=bar.update)


def impatient(arrivals: Iterator[Arrival], wait_ns: int) -> Iterator[Arrival]:
    """Who states no longest wait has this one, as at a server's gateway."""
    for arrival in arrivals:
        request = arrival.request
        if request.queue_wait_ns_max is None:
            request = replace(request, queue_wait_ns_max=wait_ns)
        yield replace(arrival, request=request)


def trace_path(path: Path, policy: Policy, scene_count: int) -> Path:
    """With several policies each writes a file of its own."""
    if scene_count == 1:
        return path
    return path.with_name(f"{path.stem}.{policy.name}{path.suffix}")
