"""`phaseloop bench policies`: one workload under each policy, and on other servers, in one run.

All policies are measured on one server of phaseloop, which is told to change between runs: the
model, the memory and the machine's warmth are then the same for all.  Every repeat runs all of them
in an order drawn anew.  What is not whole (a stream without its end, totals that differ) is
rejected and counted, and never part of a figure.
"""

import shlex
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from typing import Any, cast

from msgspec.structs import replace
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from phaseloop.core.policy import PRESETS
from phaseloop.engine.sim_fields import SettingError
from phaseloop.sim.workload import Workload, read_workload

from .bench_load import OtherLoad
from .bench_policies_figures import Taken, sample_of
from .bench_policies_report import Report, as_html, as_json, as_markdown, notes, sections
from .bench_policies_run import Rejected, run_once
from .bench_policies_target import Server, Target, find_server
from .bench_policies_work import Ask, asks_of, words_for
from .bench_tables import save, table_of
from .child import ChildServer
from .client import ClientError
from .ending import interrupted_code
from .ending_async import run_async
from .errors import UserError, some_path
from .main import load

HELP = "one workload under each policy, and beside other servers: throughput and waits"
DESCRIPTION = """\
Sends the requests of a workload when they arrive, under every policy in turn, and shows how long
their clients waited.  Policies are measured on one server: of -m or --sim, which is started for the
occasion, or of --url, which needs --phase-control and --metrics."""
OWN = "the server"  # in messages, whose policies are compared
PLAIN_WIDTH = 140  # of tables where no terminal has one


def add_arguments(parser: ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.add_argument("workload", type=some_path, metavar="WORKLOAD", help="a TOML file")
    whose = parser.add_mutually_exclusive_group(required=True)
    whose.add_argument("-m", "--model", metavar="MODEL", help="a GGUF file, or a pulled name")
    whose.add_argument("--sim", metavar="ENGINE", help="an engine of simulate --list-engines")
    whose.add_argument("--url", metavar="URL", help="a phaseloop server that runs already")
    parser.add_argument("--api-key", metavar="KEY", help="for --url and --against")
    parser.add_argument(
        "--serve",
        type=shlex.split,
        default=[],
        metavar="FLAGS",
        help="further flags of phaseloop serve, as in --serve='-np 4 -t 2'",
    )
    parser.add_argument(
        "--policies",
        type=policies,
        default="all",
        metavar="A,B",
        help="which ones, with settings if need be, as in quantum:pp_quantum_ms=250; default: all",
    )
    parser.add_argument(
        "--against",
        action="append",
        default=[],
        metavar="NAME=URL",
        help="another server with the same model; may be given several times",
    )
    parser.add_argument("--repeats", type=positive, default=3, metavar="N", help="by default 3")
    parser.add_argument("--seed", type=int, metavar="N", help="instead of the workload's")
    parser.add_argument(
        "--limit-s", type=positive, default=900, metavar="N", help="longest run; by default 900"
    )
    parser.add_argument("--json", type=some_path, metavar="FILE", help="every token's time as well")
    parser.add_argument("--markdown", type=some_path, metavar="FILE", help="the tables")
    parser.add_argument("--html", type=some_path, metavar="FILE", help="tables and pictures")
    parser.add_argument("--png", type=some_path, metavar="DIR", help="the pictures (extra plot)")


def positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 1 << 20:
        raise ArgumentTypeError(f"{text!r} is not an integer from 1 on")
    return int(text)


def policies(text: str) -> dict[str, dict[str, Any]]:
    """What is shown -> the body of PUT /phase.  The server judges the settings."""
    if text == "all":
        return {name: {"policy": name} for name in PRESETS}
    found: dict[str, dict[str, Any]] = {}
    for part in text.split(","):
        name, *settings = part.split(":")
        if name not in PRESETS:
            raise ArgumentTypeError(f"no policy {name!r}; there are {', '.join(PRESETS)}")
        body: dict[str, Any] = {"policy": name}
        for setting in settings:
            key, _, value = setting.partition("=")
            if key in body:
                raise ArgumentTypeError(f"{part}: {key} is named twice")
            body[key] = int(value) if value.isdigit() else value
        if body in found.values():
            raise ArgumentTypeError(f"{part} is named twice; each is measured once per repeat")
        found[part] = body
    return found


def run(args: Namespace) -> int:
    """Raises UserError."""
    plots = plotter() if args.html is not None or args.png is not None else None
    try:
        workload = read_workload(args.workload)
    except SettingError as error:
        raise UserError(str(error)) from None
    seed = workload.seed if args.seed is None else args.seed
    asks = asks_of(workload, seed)
    taken: list[Taken] = []
    bench = Bench(args, workload, asks, seed, taken)
    other_load = OtherLoad()
    interruption: KeyboardInterrupt | None = None
    try:
        run_async(bench.measure())
    except KeyboardInterrupt as error:
        if not taken:
            raise
        interruption = error
    report = Report(
        command=command_of(args),
        workload=args.workload.name,
        requests=len(asks),
        seed=seed,
        targets=tuple(bench.names),
        own=tuple(args.policies),
        taken=tuple(taken),
        others_cores=other_load.cores(),
        is_interrupted=interruption is not None,
    )
    publish(report, args, {} if plots is None else plots(report))
    if interruption is not None:
        return interrupted_code(interruption)
    return 0 if report.measured else 1


def plotter() -> Any:  # noqa: ANN401  a module that may be missing
    try:
        return load("bench_policies_plots").pictures
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise UserError("--html and --png need matplotlib: pip install 'phaseloop[plot]'") from None


class Bench:
    """The runs of one command.  `taken` grows while it goes, so an interruption loses nothing."""

    def __init__(
        self, args: Namespace, workload: Workload, asks: list[Ask], seed: int, taken: list[Taken]
    ) -> None:
        self.names: list[str] = [*args.policies, *(one.split("=")[0] for one in args.against)]
        self._args = args
        self._workload = workload
        self._asks = asks
        self._seed = seed
        self._taken = taken

    async def measure(self) -> None:
        """Raises UserError for servers that are not there or cannot be compared."""
        if len(set(self.names)) < len(self.names):
            raise UserError("two of what is compared have one name; rename in --against")
        others = [await self._other(given) for given in self._args.against]
        async with AsyncExitStack() as stack:
            own = await self._own(stack)
            targets = [Target(name, own, body) for name, body in self._args.policies.items()]
            targets += [Target(server.name, server) for server in others]
            try:
                await check_control(own, targets)
                prompts = [await prompt_of(own, ask, self._seed) for ask in self._asks]
            except ClientError as error:
                raise UserError(str(error)) from None
            await self._repeat(targets, prompts)

    async def _own(self, stack: AsyncExitStack) -> Server:
        args = self._args
        if args.url is not None:
            server = await find_server(OWN, args.url, args.api_key, given=f"--url {args.url}")
            return replace(server, protocol="native")
        model = ("-m", args.model) if args.model is not None else ("--sim", args.sim)
        flags = (*model, "--phase-control", "--metrics", *args.serve)
        child = await stack.enter_async_context(ChildServer(flags))
        return Server(OWN, child.address, None, "native", "")

    async def _other(self, given: str) -> Server:
        name, _, url = given.partition("=")
        if not name or not url:
            raise UserError(
                f"--against {given}: NAME=URL is expected, as in other=http://host:8080"
            )
        return await find_server(name, url, self._args.api_key, given=f"--against {given}")

    async def _repeat(self, targets: Sequence[Target], prompts: Sequence[list[int]]) -> None:
        """One request to each that does not count, then the repeats."""
        random = Random(self._seed)
        with bar_of() as bar:
            task = bar.add_task("warm-up", total=self._args.repeats * len(targets))
            for target in targets:
                one = replace(self._asks[0], at_ns=0, leaves_after_ns=None, tokens=1)
                await self._run(target, [one], prompts[:1], None)
            for repeat in range(1, self._args.repeats + 1):
                for target in random.sample(targets, len(targets)):
                    bar.update(task, description=f"{target.name}, repeat {repeat}")
                    taken = await self._run(target, self._asks, prompts, self._workload.cut_ns)
                    self._taken.append(replace(taken, repeat=repeat))
                    bar.advance(task)

    async def _run(
        self, target: Target, asks: Sequence[Ask], prompts: Sequence[list[int]], cut_ns: int | None
    ) -> Taken:
        try:
            run = await run_once(target, asks, prompts, cut_ns, self._args.limit_s)
        except Rejected as error:
            return Taken(0, target.name, rejected=str(error))
        return Taken(0, target.name, sample=sample_of(run))


def bar_of() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    is_shown = sys.stderr.isatty()
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=not is_shown)


async def check_control(own: Server, targets: Sequence[Target]) -> None:
    """Every policy can be had.  Raises ClientError with the server's reason."""
    for target in targets:
        if target.policy is not None:
            try:
                await own.send("PUT", "/phase", target.policy)
            except ClientError as error:
                raise ClientError(f"--policies {target.name}: {error}") from None


async def prompt_of(own: Server, ask: Ask, seed: int) -> list[int]:
    body = {"content": words_for(ask, seed), "add_special": False}
    answer = await own.send("POST", "/tokenize", body)
    tokens = cast(list[int], answer["tokens"])
    if len(tokens) < ask.prompt_length:
        raise ClientError(f"{own.name}: its tokenizer makes one token of several words")
    return tokens[: ask.prompt_length]


def publish(report: Report, args: Namespace, pictures: dict[str, tuple[str, bytes]]) -> None:
    if args.json is not None:
        save(args.json, as_json(report))
    if args.markdown is not None:
        save(args.markdown, as_markdown(report).encode())
    if args.html is not None:
        save(args.html, as_html(report, list(pictures.values())))
    if args.png is not None:
        make_folder(args.png)
        for name, (_, png) in pictures.items():
            save(args.png / f"{args.workload.stem}-{name}.png", png)
    show(report)


def make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--png {path}: {error.strerror or error}") from None


def show(report: Report) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    for title, cells in sections(report):
        console.print(table_of(cells, title))
    for note in notes(report):
        console.print(note, highlight=False, markup=False)


def command_of(args: Namespace) -> str:
    words = ["phaseloop", "bench", "policies", args.workload.name]
    if args.url is not None:
        words += ["--url", args.url]
    else:
        words += ["-m", Path(args.model).name] if args.model else ["--sim", args.sim]
    if args.serve:
        words.append(f"--serve={shlex.join(args.serve)}")
    words += ["--policies", ",".join(args.policies)]
    for given in args.against:
        words += ["--against", given]
    return shlex.join([*words, "--repeats", str(args.repeats)])
