"""Where the CUDA sources lie, and names for what was built from them."""

import hashlib
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .contract import KernelError

INCLUDE = re.compile(r'^\s*#include "([^"]+)"', re.MULTILINE)


def source_directory() -> Path:
    """cuda/ of the repository, or its copy in an installed package."""
    package = Path(__file__).parent.parent
    for directory in (package / "_cuda", package.parent.parent / "cuda"):
        if (directory / "common.cuh").is_file():
            return directory
    raise KernelError(f"the CUDA sources are missing: neither {package}/_cuda nor a repository")


def build_directory() -> Path:
    """Where built kernels are kept between runs: $PHASELOOP_KERNEL_CACHE, or below ~/.cache."""
    named = os.environ.get("PHASELOOP_KERNEL_CACHE")
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = Path(named) if named else caches / "phaseloop" / "kernels"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KernelError(
            f"{directory}: cannot keep built kernels there ({error.strerror}); "
            "PHASELOOP_KERNEL_CACHE may name another directory"
        ) from error
    return directory


def included(path: Path, seen: set[Path] | None = None) -> Iterator[Path]:
    """A source and all that it includes with quotes, each once, in the order of inclusion.

    Names are looked up beside the source, then in our own directory.
    """
    seen = set() if seen is None else seen
    path = path.resolve()
    if path in seen:
        return
    seen.add(path)
    try:
        text = path.read_text()
    except OSError as error:
        raise KernelError(f"{path}: {error.strerror}") from error
    yield path
    for name in INCLUDE.findall(text):
        beside = path.parent / name
        yield from included(beside if beside.is_file() else source_directory() / name, seen)


def digest(sources: list[Path], *parts: str) -> str:
    """Names what is built from sources (and what they include) with the options in `parts`."""
    state = hashlib.blake2b(digest_size=16)
    for source in sources:
        for path in included(source):
            content = path.read_bytes()
            state.update(f"{path.name} {len(content)}\n".encode() + content)
    for part in parts:
        state.update(f"{len(part)} {part}".encode())
    return state.hexdigest()


def write_atomically(path: Path, content: bytes) -> None:
    """Nobody finds half a file, whoever else builds the same at the same moment."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    Path(file.name).replace(path)
