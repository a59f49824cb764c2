"""Goal: however a command ends, its user sees a sentence and an exit code, never a traceback.

Method: main() with commands put in its table for the test; whole processes where signals, pipes or
the time to start matter.
"""

import argparse
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType

import pytest

from phaseloop import __version__
from phaseloop.cli import main as main_module
from phaseloop.cli.errors import UserError
from phaseloop.cli.main import COMMANDS, main

PHASELOOP = [sys.executable, "-m", "phaseloop"]


@pytest.fixture
def command(monkeypatch) -> Callable[[Callable[[argparse.Namespace], int]], None]:
    """Registers a command `probe` that takes one argument and runs a function of the test's."""

    def register(run: Callable[[argparse.Namespace], int]) -> None:
        probe = ModuleType("phaseloop.cli.probe")
        probe.HELP = "probe what main does"
        probe.add_arguments = lambda parser: parser.add_argument("value", type=int)
        probe.run = run
        monkeypatch.setitem(COMMANDS, "probe", probe.HELP)
        monkeypatch.setitem(sys.modules, "phaseloop.cli.probe", probe)

    return register


def test_a_command_gets_its_arguments_and_gives_the_exit_code(command):
    command(lambda args: args.value + 1)
    assert main(["probe", "2"]) == 3


def test_a_user_error_is_one_line_on_stderr(command, capsys):
    def run(args: argparse.Namespace) -> int:
        raise UserError("no such workload: pair.toml", exit_code=args.value)

    command(run)
    assert main(["probe", "7"]) == 7
    assert capsys.readouterr() == ("", "phaseloop: no such workload: pair.toml\n")


def test_a_user_error_is_a_usage_error_unless_it_says_otherwise():
    assert UserError("wrong").exit_code == 2


def test_an_interrupt_is_no_traceback(command, capsys):
    def run(args: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    command(run)
    assert main(["probe", "0"]) == 130
    assert capsys.readouterr() == ("", "")


def test_our_own_faults_are_not_hidden(command):
    def run(args: argparse.Namespace) -> int:
        raise ZeroDivisionError

    command(run)
    with pytest.raises(ZeroDivisionError):
        main(["probe", "0"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["probe"], "required: value"),
        (["probe", "x"], "invalid int value: 'x'"),
        (["probe", "1", "--surplus"], "unrecognized arguments: --surplus"),
    ],
)
def test_wrong_arguments_are_named(command, capsys, arguments, says):
    command(lambda args: 0)
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert "usage: phaseloop probe" in err


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("simulat", "did you mean simulate?"),
        ("reply", "did you mean replay?"),
        ("xyzzy", f"there are {', '.join(COMMANDS)}"),
    ],
)
def test_an_unknown_command_names_the_nearest(capsys, name, says):
    assert main([name]) == 2
    assert capsys.readouterr() == ("", f"phaseloop: no command {name!r}: {says}\n")


def test_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for name, text in COMMANDS.items():
        assert f"  {name:<8}  {text}\n" in out


def test_without_a_command_help_is_an_error(capsys):
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "usage: phaseloop" in err


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"phaseloop {__version__}\n"


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_keeps_the_contract(name, capsys):
    module = importlib.import_module(f"phaseloop.cli.{name}")
    assert COMMANDS[name] == module.HELP
    assert main([name, "--help"]) == 0
    assert f"usage: phaseloop {name}" in capsys.readouterr().out


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_help_and_version_import_no_command(argument):
    program = (
        "import sys; from phaseloop.cli.main import main; main(sys.argv[1:])\n"
        "heavy = {'asyncio', 'msgspec', 'rich', 'phaseloop.core'}\n"
        "sys.exit(','.join(sorted(heavy & set(sys.modules))) or 0)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, argument], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_command_imports_no_other(command, monkeypatch):
    asked = []
    monkeypatch.setattr(main_module, "load", lambda name: asked.append(name) or probe)
    probe = ModuleType("probe")
    probe.HELP, probe.add_arguments, probe.run = "", lambda parser: None, lambda args: 0
    assert main(["replay"]) == 0
    assert asked == ["replay"]


def test_a_reader_that_has_enough_is_no_error():
    program = (
        "import sys\n"
        "from types import ModuleType\n"
        "from phaseloop.cli import main\n"
        "probe = sys.modules['phaseloop.cli.probe'] = ModuleType('probe')\n"
        "probe.HELP, probe.add_arguments = '', lambda parser: None\n"
        "def run(args):\n"
        "    while True: print('line')\n"
        "probe.run = run\n"
        "main.COMMANDS['probe'] = ''\n"
        "sys.exit(main.main(['probe']))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"line\n"
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 128 + signal.SIGPIPE


def test_help_into_a_closed_pipe_is_quiet():
    reading, writing = os.pipe()
    os.close(reading)
    ran = subprocess.run(
        [*PHASELOOP, "--help"], stdout=writing, stderr=subprocess.PIPE, check=False
    )
    os.close(writing)
    assert ran.stderr == b""
    # Where Python does not buffer, argparse itself has dealt with the pipe.
    assert ran.returncode in (0, 128 + signal.SIGPIPE)
