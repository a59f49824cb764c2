"""Goal: an output has one writer, keeps what it held if a second one comes, and names itself.

Method: files, a device that is always full and a pipe, opened twice or written to.
"""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from phaseloop.runtime.output import create, refuse_busy


def test_it_is_emptied_and_written(tmp_path):
    path = tmp_path / "out"
    path.write_bytes(b"what was there before")
    with create(path) as out:
        out.write(b"new")
    assert path.read_bytes() == b"new"


def test_a_second_writer_is_refused_and_harms_nothing(tmp_path):
    path = tmp_path / "out"
    with create(path) as out:
        out.write(b"first")
        out.flush()
        with pytest.raises(OSError, match="written by another process") as caught:
            create(path)
        assert caught.value.filename == path
        with pytest.raises(OSError, match="written by another process"):
            refuse_busy(path)
        assert path.read_bytes() == b"first"
    refuse_busy(path)
    create(path).close()


def test_another_process_is_refused_and_a_dead_one_is_no_hindrance(tmp_path):
    path = tmp_path / "out"
    program = (
        "import sys; from pathlib import Path; from phaseloop.runtime.output import create\n"
        "out = create(Path(sys.argv[1])); print('open', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == b"open\n"
        with pytest.raises(OSError, match="written by another process"):
            create(path)
        other.kill()
    create(path).close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_full_disk_names_the_file():
    out = create(Path("/dev/full"))
    out.write(b"x")
    with pytest.raises(OSError, match="No space left") as caught:
        out.flush()
    assert caught.value.filename == Path("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        out.close()


def test_a_pipe_is_written_to(tmp_path):
    path, read = tmp_path / "pipe", list[bytes]()
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: read.append(path.read_bytes()))
    reader.start()
    with create(path) as out:
        out.write(b"through")
    reader.join()
    assert read == [b"through"]


def test_errors_of_opening_are_those_of_open(tmp_path):
    with pytest.raises(IsADirectoryError):
        create(tmp_path)
    with pytest.raises(FileNotFoundError):
        create(tmp_path / "no" / "such")
