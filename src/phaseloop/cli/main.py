"""`phaseloop COMMAND ...`: finds the command, and turns whatever ends it into an exit code.

A command is a module `phaseloop.cli.<name>` with `HELP`, `add_arguments(parser)` and `run(args)`,
which returns the exit code; or with `run_line(arguments)`, where it reads its line itself.  Only
the module of the command that was asked for is imported, so that `--help` and `--version` answer at
once.
"""

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from types import ModuleType
from typing import Protocol, TextIO, cast

from phaseloop import __version__

from .ending import end_in_order, interrupted_code
from .errors import EXIT_USAGE, UserError

COMMANDS = {  # in the order of the help
    "demo": "fetch a small model, serve it, and show one streamed answer",
    "serve": "serve a model over HTTP, with prompts and answers in separate phases",
    "pull": "fetch a model into the cache, or list what is there",
    "inspect": "show what a GGUF file holds, the memory it takes, and whether it can be served",
    "doctor": "say what this machine has for phaseloop, what is wrong with it, and what to do",
    "top": "watch what each slot of a running server does, and why",
    "simulate": "run a workload against a policy in virtual time, and measure it",
    "check": "visit every state of the reducer within bounds, and check every promise",
    "replay": "run a recorded trace again: check it, explain it, export it, change it",
    "bench": "measure the engine, the policies or the server on this machine",
}
READS_ITS_LINE = ("serve",)  # llama-server's flags are not in argparse's manner
EXIT_PIPE_CLOSED = 141  # 128 + SIGPIPE


class LineCommand(Protocol):
    def run_line(self, arguments: Sequence[str]) -> int: ...


class Command(Protocol):
    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...
    def run(self, args: argparse.Namespace) -> int: ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; `argv` without the program's name, the process's own if None."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None:  # the process is ours
        os.environ["PYTHONSAFEPATH"] = "1"  # whatever it starts imports nothing from where we are
        if arguments[:1] != ["serve"]:  # which ends in an order of its own
            end_in_order()
    sys.stdout, sys.stderr = usable(sys.stdout), usable(sys.stderr)
    try:
        exit_code = dispatch(arguments)
        sys.stdout.flush()
        return exit_code
    except UserError as error:
        complain(str(error))
        return error.exit_code
    except KeyboardInterrupt as interruption:
        return interrupted_code(interruption)
    except BrokenPipeError:
        # Whoever read the output has enough.  What is still buffered must not be tried again when
        # the interpreter ends.
        discard_output()
        return EXIT_PIPE_CLOSED
    except OSError as error:  # inputs are answered for by their commands: this is a full disk
        complain(f"output: {error.strerror or error}")
        discard_output()
        return EXIT_USAGE


def usable(stream: TextIO | None) -> TextIO:
    """The stream, or nowhere if it was closed; what it cannot encode is escaped, not fatal."""
    if stream is None:
        return Path(os.devnull).open("w")  # for the rest of the process
    wrapper: object = stream
    if isinstance(wrapper, TextIOWrapper):
        wrapper.reconfigure(errors="backslashreplace")
    return stream


def discard_output() -> None:
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def dispatch(arguments: list[str]) -> int:
    name = arguments[0] if arguments else None
    if name not in COMMANDS:
        return answer_without_command(arguments)
    if name in READS_ITS_LINE:
        return cast(LineCommand, load(name)).run_line(arguments[1:])
    return run_module(name, f"phaseloop {name}", arguments[1:])


def run_module(name: str, program: str, arguments: Sequence[str]) -> int:
    """Load the command `phaseloop.cli.<name>` and run it; `program` is what its help calls it."""
    command = cast(Command, load(name))
    parser = argparse.ArgumentParser(
        prog=program,
        description=command.HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_arguments(parser)
    try:
        args = parser.parse_args(arguments)
    except SystemExit as end:  # argparse has said what is wrong, or has printed the help
        return exit_code_of(end)
    return command.run(args)


def load(name: str) -> ModuleType:
    return importlib.import_module(f"phaseloop.cli.{name}")


def answer_without_command(arguments: list[str]) -> int:
    """`--help`, `--version`, nothing at all, or what is no command."""
    parser = argparse.ArgumentParser(
        prog="phaseloop",
        usage="phaseloop [--help] [--version] COMMAND ...",
        description="An LLM server in which prompts and answers never share the engine.",
        epilog=commands_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"phaseloop {__version__}")
    if not arguments:
        parser.print_help(sys.stderr)
        return EXIT_USAGE
    if not arguments[0].startswith("-"):
        raise UserError(unknown_command(arguments[0]))
    try:
        parser.parse_args(arguments)
    except SystemExit as end:
        return exit_code_of(end)
    raise UserError(f"{arguments[0]} wants a command after it; see phaseloop --help")


def commands_help() -> str:
    width = max(map(len, COMMANDS))
    lines = (f"  {name:<{width}}  {text}" for name, text in COMMANDS.items())
    return "\n".join(("commands:", *lines, "", "phaseloop COMMAND --help tells about one command."))


def unknown_command(name: str) -> str:
    near = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
    remedy = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
    return f"no command {name!r}: {remedy}"


def exit_code_of(end: SystemExit) -> int:
    return end.code if isinstance(end.code, int) else 0


def complain(message: str) -> None:
    sys.stderr.write(f"phaseloop: {message}\n")


if __name__ == "__main__":
    sys.exit(main())
