"""`phaseloop doctor`: what a machine has for phaseloop, what is wrong, and what to do about it."""

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterator

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from phaseloop.kernels.contract import KernelError
from phaseloop.kernels.driver import Driver, Gpu
from phaseloop.kernels.peers import parse_peer_access

from .doctor_facts import Facts, Failure, Gpus, Problem
from .doctor_judge import problems, size, wants_gpus
from .doctor_probe import clear_kernel_cache, examine
from .errors import UserError

HELP = "say what this machine has for phaseloop, what is wrong with it, and what to do"
EXIT_BROKEN = 1
PLAIN_WIDTH = 100
ABSENT = "none here, and none is needed: the CPU engine does without"


class Diagnosis(Struct, frozen=True):
    """What --json prints."""

    can_serve: bool
    problems: tuple[Problem, ...]
    facts: Facts


def add_arguments(parser: ArgumentParser) -> None:
    parser.epilog = f"Exit code 0: the CPU engine works; {EXIT_BROKEN}: serve lacks what it needs."
    parser.add_argument("--json", action="store_true", help="everything, as one JSON object")
    parser.add_argument(
        "--peer-access", type=pairs, default="all", metavar="PAIRS",
        help="try copies between these GPUs: all, none, or pairs as 0:1,2:3; by default all",
    )  # fmt: skip
    parser.add_argument(
        "--clear-cache", action="store_true",
        help="remove the kernels that were built here, and do nothing else",
    )  # fmt: skip


def pairs(text: str) -> str:
    try:
        parse_peer_access(text)
    except KernelError as error:
        raise ArgumentTypeError(str(error)) from None
    return text


def run(args: Namespace) -> int:
    """Raises UserError for a kernel cache that cannot be cleared."""
    if args.clear_cache:
        return clear()
    with Console(stderr=True).status("trying what is here ..."):
        facts = examine(args.peer_access)
    found = problems(facts)
    can_serve = not any(problem.is_fatal for problem in found)
    if args.json:
        diagnosis = Diagnosis(can_serve, found, facts)
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(diagnosis)).decode() + "\n")
    else:
        show(facts, found, can_serve=can_serve)
    return 0 if can_serve else EXIT_BROKEN


def clear() -> int:
    try:
        files, removed_bytes = clear_kernel_cache()
    except (KernelError, OSError) as error:
        raise UserError(f"the kernel cache cannot be cleared: {error}") from None
    sys.stdout.write(f"{files} files removed, {removed_bytes / 2**20:.1f} MiB\n")
    return 0


# --- for people -----------------------------------------------------------------------------------


def show(facts: Facts, found: tuple[Problem, ...], *, can_serve: bool) -> None:
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in (*host_lines(facts), *gpu_lines(facts)):
        table.add_row(name, text)
    console.print(table)
    console.print()
    for problem in found:
        degree = "BROKEN" if problem.is_fatal else "problem"
        console.print(f"{degree}: {problem.about}: {problem.text}", soft_wrap=True)
    verdict = "the CPU engine works" if can_serve else "serve lacks what it needs"
    console.print(f"{verdict}; {len(found) or 'no'} problem{'' if len(found) == 1 else 's'}")


def host_lines(facts: Facts) -> Iterator[tuple[str, str]]:
    yield "phaseloop", f"{facts.phaseloop} on {facts.system}"
    yield "Python", f"{facts.python.version} (wanted {facts.python.bounds})"
    here = [package for package in facts.packages if package.found is not None]
    yield "packages", ", ".join(f"{package.name} {package.found}" for package in here)
    ggml = facts.ggml
    if isinstance(ggml, Failure):
        yield "ggml", ggml.why
    else:
        yield "ggml", f"{ggml.release} of ggml-python {ggml.package}, {ggml.threads} threads"
        yield "", f"CPU features: {', '.join(ggml.features)}"
        yield "", f"rows have the same bits in any company: {', '.join(ggml.stable) or 'none'}"
    built = facts.compiler
    yield "g++", f"{built.why} (of use in tests alone)" if isinstance(built, Failure) else built
    yield "models", f"{facts.model_cache.directory}, {size(facts.model_cache.free_bytes)} free"
    cache = facts.kernel_cache
    if isinstance(cache, Failure):
        yield "kernel cache", cache.why
    else:
        kept = f"{cache.files} files, {cache.size_bytes / 2**20:.1f} MiB"
        yield "kernel cache", f"{cache.directory}, {kept}"


def gpu_lines(facts: Facts) -> Iterator[tuple[str, str]]:
    if isinstance(facts.driver, Failure):
        yield "GPUs", facts.driver.why if wants_gpus(facts) else ABSENT
    else:
        yield from driver_lines(facts.driver)
    toolkit = facts.toolkit
    if isinstance(toolkit, Failure):
        yield "NVRTC", toolkit.why
    else:
        known = f"{toolkit.architectures[0] / 10} to {toolkit.architectures[-1] / 10}"
        yield "NVRTC", f"{toolkit.release}, for compute capabilities {known}"
        headers = toolkit.headers
        yield "", headers.why if isinstance(headers, Failure) else f"headers in {headers}"
    yield "CuPy", ", ".join(facts.cupy_packages) or "not installed"
    if isinstance(facts.gpus, Gpus):
        yield from tried_lines(facts.gpus)


def driver_lines(driver: Driver) -> Iterator[tuple[str, str]]:
    newest = ".".join(map(str, driver.cuda))
    yield "driver", f"{driver.release or 'unknown'}, up to CUDA {newest}"
    for gpu in driver.gpus:
        yield f"GPU {gpu.index}", gpu_text(gpu)


def gpu_text(gpu: Gpu) -> str:
    free = "unknown" if gpu.free_bytes is None else size(gpu.free_bytes)
    return (
        f"{gpu.name}, compute capability {gpu.compute[0]}.{gpu.compute[1]}, "
        f"{size(gpu.memory_bytes)}, of which {free} free"
    )


def tried_lines(gpus: Gpus) -> Iterator[tuple[str, str]]:
    for device in gpus.devices:
        works = (
            "a kernel was compiled, run, and right" if device.failure is None else device.failure
        )
        yield "", f"GPU {device.index}: {works}"
    for pair in gpus.pairs:
        yield "", f"GPU {pair.source} to {pair.target}: {pair.state}: {pair.why}"
