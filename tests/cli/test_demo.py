"""Goal: the README's first command shows a real model's answer, and fails with a reason.

Method: the command as a process of its own, with the model that the tests have anyway.
"""

import subprocess
import sys
from pathlib import Path

TIMEOUT_S = 50
QUESTION = "Name the largest planet of the solar system."  # no token of the answer is a near tie
COMMAND = (sys.executable, "-m", "phaseloop", "demo")


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = (*COMMAND, *arguments)
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def test_an_answer_is_streamed_and_its_figures_follow(smollm2: Path):
    ran = demo("-m", str(smollm2), "--max-tokens", "8", QUESTION)
    assert ran.returncode == 0, ran.stderr
    assert "curl -N http://127.0.0.1:" in ran.stdout
    assert "The largest planet of the solar system is" in ran.stdout, "as llama-server answers, too"
    assert "generated at" in ran.stdout
    assert "stopped" in ran.stderr, "the server's own log is shown, to its end"


def test_a_server_that_does_not_come_up_is_quoted(tmp_path: Path):
    missing = tmp_path / "nothing.gguf"
    ran = demo("-m", str(missing))
    assert ran.returncode == 2
    assert "the server did not come up" in ran.stderr
    assert str(missing) in ran.stderr
    assert "Traceback" not in ran.stderr


def test_at_least_one_token_is_asked_for():
    ran = demo("--max-tokens", "0")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "--max-tokens 0: at least one token is needed" in ran.stderr
