"""`phaseloop bench engine`: prompts and answers per second, beside llama.cpp and the limits.

Every repeat takes one sample per row and runner, the rows and within them the runners in an order
drawn anew; so what a busy or throttled machine does to one it does to all.
"""

import os
import shlex
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from phaseloop.engine.cpu_load import CpuOptions, backend_over, engine_over
from phaseloop.engine.sampling import ChainSampler
from phaseloop.model.gguf_file import ModelError
from phaseloop.model.load import load_model
from phaseloop.model.shape import Model
from phaseloop.model.weights import Weights, open_weights
from phaseloop.ops.ggml import AttentionPath
from phaseloop.ops.interface import BackendError

from .bench_engine_limits import measure_limits
from .bench_engine_llama import BenchRunner, Program, ServerRunner, ServerSize, find_program
from .bench_engine_own import PassRunner, Prompts, RoundsRunner
from .bench_engine_report import (
    Report,
    Taken,
    as_csv,
    as_json,
    check_page,
    notes,
    page_with,
    tables,
)
from .bench_engine_rows import DECODE_ROUNDS, Rejected, Row, Runner
from .bench_load import OtherLoad
from .bench_tables import save
from .errors import UserError
from .models import resolve

HELP = "prompts and answers per second, beside llama.cpp and the machine's limits"
DESCRIPTION = f"""\
Measures the CPU engine on a model: prompts of several lengths, and {DECODE_ROUNDS} tokens of answer
to each of several streams, with the attention whose bits are stable (the default of phaseloop
serve) and with --fast-attention; as rounds with sampling, and the forward pass alone."""
PATHS: tuple[AttentionPath, ...] = ("tiled", "fast")
PROGRAMS = ("llama-bench", "llama-server")
PLAIN_WIDTH = 160  # of tables where no terminal has one
SPARE_TOKENS = 8  # a sequence may need beyond its prompt and answer


def add_arguments(parser: ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.add_argument(
        "-m", "--model", metavar="MODEL", required=True, help="a GGUF file, or a pulled name"
    )
    parser.add_argument(
        "-t", "--threads", type=positive, default=cores(), metavar="N", help="one per core"
    )
    parser.add_argument(
        "--against",
        action="append",
        default=[],
        metavar="NAME=COMMAND",
        help="measure this in turn as well: llama-bench or llama-server, and how it is called",
    )
    parser.add_argument("--repeats", type=positive, default=5, metavar="N", help="by default 5")
    for name, default, what in (
        ("prefill", "128,512,2048", "tokens of a prompt"),
        ("decode", "1,2,4,8", "streams"),
    ):
        parser.add_argument(
            f"--{name}", type=sizes, default=default, metavar="N,N", help=f"{what}; {default}"
        )
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: count CPU time, where others use the machine; one thread, no llama-bench",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the order of samples")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured there")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write every sample there")
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="rewrite this page's section on the engine"
    )


def positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 1 << 20:
        raise ArgumentTypeError(f"{text!r} is not an integer from 1 on")
    return int(text)


def sizes(text: str) -> tuple[int, ...]:
    """Some of a kind of row; nothing for none."""
    return tuple(dict.fromkeys(positive(part) for part in text.split(",") if part))


def cores() -> int:
    return len(os.sched_getaffinity(0))


def run(args: Namespace) -> int:
    """Raises UserError for options, models and programs that are of no use."""
    rows = tuple(Row("prefill", n) for n in args.prefill) + tuple(
        Row("decode", n) for n in args.decode
    )
    if not rows:
        raise UserError("--prefill and --decode are both empty: nothing to measure")
    programs = programs_of(args)
    if args.markdown is not None:
        check_page(args.markdown)
    path = resolve(args.model)
    try:
        report = measure(args, path, rows, programs)
    except (ModelError, BackendError) as error:
        raise UserError(str(error)) from None
    if args.json is not None:
        save(args.json, as_json(report))
    if args.csv is not None:
        save(args.csv, as_csv(report).encode())
    if args.markdown is not None:
        save(args.markdown, page_with(args.markdown, report).encode())
    show(report)
    return 0


def show(report: Report) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    for table in tables(report):
        console.print(table)
    for note in notes(report):
        console.print(note, highlight=False)


def programs_of(args: Namespace) -> list[Program]:
    programs: list[Program] = []
    for given in args.against:
        name, _, command = given.partition("=")
        if name not in PROGRAMS:
            raise UserError(f"--against {given}: known are {' and '.join(PROGRAMS)}, as NAME=PATH")
        programs.append(find_program(name, command))
    if args.clock == "cpu":
        if args.threads > 1:
            raise UserError(
                "--clock cpu wants --threads 1: threads that wait for each other use CPU time"
            )
        if any(program.name == "llama-bench" for program in programs):
            raise UserError("--clock cpu leaves llama-bench out: its loading would count as well")
    return programs


def measure(
    args: Namespace, path: Path, rows: tuple[Row, ...], programs: Sequence[Program]
) -> Report:
    weights = open_weights(path)
    model = load_model(weights)
    with ExitStack() as stack:
        runners = start(args, weights, model, rows, programs, stack)
        limits = measure_limits(weights, model, args.threads, args.clock)
        load = OtherLoad()
        taken = sample_all(runners, rows, args.repeats, Random(args.seed))
        built = {runner.name: runner.build for runner in runners if isinstance(runner, BenchRunner)}
    return Report(
        command=command_of(args, path, programs),
        model=path.name,
        model_bytes=weights.size_bytes,
        backend=next(r.backend for r in runners if isinstance(r, RoundsRunner)),
        threads=args.threads,
        clock=args.clock,
        repeats=args.repeats,
        programs={p.name: " ".join([p.shown, built.get(p.name, "")]).strip() for p in programs},
        rows=rows,
        runners=tuple(runner.name for runner in runners),
        taken=tuple(taken),
        limits=limits,
        others_cores=load.cores(),
    )


def start(
    args: Namespace,
    weights: Weights,
    model: Model,
    rows: Sequence[Row],
    programs: Sequence[Program],
    stack: ExitStack,
) -> list[Runner]:
    streams = max((row.size for row in rows if row.kind == "decode"), default=1)
    longest = max((row.size for row in rows if row.kind == "prefill"), default=1)
    length = max(longest, DECODE_ROUNDS + 1) + SPARE_TOKENS
    prompts = Prompts(model.dimensions.vocabulary)
    runners: list[Runner] = []

    def add(runner: Runner) -> None:
        runners.append(runner)
        stack.callback(runner.close)

    for attention in PATHS:
        options = CpuOptions(
            slot_count=streams, context_length=length, threads=args.threads, attention=attention
        )
        backend = backend_over(weights, model, options)
        stack.callback(backend.close)
        engine = engine_over(
            weights, model, ChainSampler(), options, end_tokens=frozenset[int](), backend=backend
        )
        add(RoundsRunner(engine, attention, args.clock, prompts))
        add(PassRunner(backend, attention, args.clock, prompts))
    for program in programs:
        if program.name == "llama-bench":
            add(BenchRunner(program, weights.path, args.threads))
        else:
            size = ServerSize(streams, length)
            add(ServerRunner(program, weights.path, args.threads, size, args.clock, prompts))
    return runners


def sample_all(
    runners: Sequence[Runner], rows: Sequence[Row], repeats: int, random: Random
) -> list[Taken]:
    """A sample of each, not counted, then the repeats."""
    asked = [(row, [one for one in runners if one.serves(row)]) for row in rows]
    total = (repeats + 1) * sum(len(able) for _, able in asked)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    taken: list[Taken] = []
    with Progress(
        *columns, console=console, transient=True, disable=not sys.stderr.isatty()
    ) as bar:
        task = bar.add_task("warm-up", total=total)
        for repeat in range(repeats + 1):
            for row, able in random.sample(asked, len(asked)):
                for runner in random.sample(able, len(able)):
                    bar.update(task, description=f"{runner.name}: {row.name}")
                    one = take(runner, row, repeat)
                    if repeat > 0:
                        taken.append(one)
                    bar.advance(task)
    return taken


def take(runner: Runner, row: Row, repeat: int) -> Taken:
    try:
        sample = runner.measure(row)
    except Rejected as error:
        return Taken(repeat, row, runner.name, rejected=str(error))
    return Taken(repeat, row, runner.name, sample.tokens, sample.seconds)


def command_of(args: Namespace, path: Path, programs: Sequence[Program]) -> str:
    words = ["phaseloop", "bench", "engine", "-m", path.name, "--threads", str(args.threads)]
    for program in programs:
        words += ["--against", f"{program.name}={program.shown}"]
    words += ["--repeats", str(args.repeats)]
    if args.clock != "wall":
        words += ["--clock", args.clock]
    for name in ("prefill", "decode"):
        words += [f"--{name}", ",".join(map(str, getattr(args, name)))]
    return shlex.join(words)
