"""Goal: `phaseloop bench` finds the subject that was asked for, and explains itself otherwise.

Method: main(), and the modules of the subjects.
"""

import importlib
import re

import pytest

from phaseloop.cli.bench import SUBJECTS
from phaseloop.cli.main import main


@pytest.mark.parametrize("name", list(SUBJECTS))
def test_every_subject_keeps_the_contract(name, capsys):
    assert SUBJECTS[name] == importlib.import_module(f"phaseloop.cli.bench_{name}").HELP
    assert main(["bench", name, "--help"]) == 0
    assert f"usage: phaseloop bench {name}" in capsys.readouterr().out


def test_help_lists_every_subject(capsys):
    assert main(["bench", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(
        re.search(rf"^  {name} +{re.escape(text)}$", out, re.M) for name, text in SUBJECTS.items()
    )


@pytest.mark.parametrize("arguments", [[], ["reducer"]])
def test_what_is_no_subject_is_a_usage_error(arguments, capsys):
    assert main(["bench", *arguments]) == 2
    assert "usage: phaseloop bench" in capsys.readouterr().err


def test_arguments_reach_the_subject(capsys):
    assert main(["bench", "server", "--streams", "many"]) == 2
    assert "argument --streams" in capsys.readouterr().err
