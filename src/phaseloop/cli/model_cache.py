"""Where pulled models lie: in phaseloop's own cache, or in the one that the hub's tools share."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from msgspec import Struct

from .errors import UserError

SPLIT = re.compile(r"(?P<prefix>.+)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf")
QUANT = re.compile(r"[-.]([A-Za-z0-9_]+)(-\d{5}-of-\d{5})?\.gguf$")
USUAL_QUANTS = ("Q4_K_M", "Q8_0")  # of a repository, if none is asked for, as in llama-server
SIDECARS = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")  # belong to models


class Pulled(Struct, frozen=True, gc=False):
    """A model that is there, whole.  Of a split one, `path` is its first file."""

    name: str
    path: Path
    length: int  # bytes, of all its files


def cache_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """$PHASELOOP_CACHE, else $XDG_CACHE_HOME/phaseloop, else ~/.cache/phaseloop."""
    own = environment.get("PHASELOOP_CACHE")
    return Path(own) if own else general_cache(environment) / "phaseloop"


def hub_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """Where huggingface_hub keeps repositories, and llama-server looks too."""
    hub, home = environment.get("HF_HUB_CACHE"), environment.get("HF_HOME")
    if hub:
        return Path(hub).expanduser()
    base = Path(home).expanduser() if home else general_cache(environment) / "huggingface"
    return base / "hub"


def general_cache(environment: Mapping[str, str]) -> Path:
    named = environment.get("XDG_CACHE_HOME")
    return Path(named) if named else Path.home() / ".cache"


class HubName(Struct, frozen=True, gc=False):
    """`org/repo`, `org/repo:QUANT`."""

    repository: str
    quant: str | None

    @classmethod
    def parse(cls, text: str) -> "HubName":
        """Raises UserError."""
        match = re.fullmatch(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))?", text)
        if match is None:
            raise UserError(
                f"{text!r} names no repository of the hub, which are USER/MODEL[:QUANT]"
            )
        return cls(match[1], match[2])


def choose_files(files: Sequence[str], quant: str | None, file: str | None) -> tuple[str, ...]:
    """Which of a repository's files make up the model; none if it is not there.

    Without a quant it is the first of the usual ones, else the first model that there is.
    """
    if file is not None:
        return split_parts(files, file) if file in files else ()
    models = [name for name in sorted(files) if is_first_of_model(name)]
    for wanted in (quant,) if quant else USUAL_QUANTS:
        pattern = re.compile(re.escape(wanted) + "[.-]", re.IGNORECASE)
        for name in models:
            if pattern.search(name):
                return split_parts(files, name)
    return split_parts(files, models[0]) if models and quant is None else ()


def is_first_of_model(name: str) -> bool:
    base = PurePosixPath(name).name
    split = SPLIT.fullmatch(name)
    is_first = split is None or int(split["part"]) == 1
    is_model = base.endswith(".gguf") and not any(part in base for part in SIDECARS)
    return is_model and is_first


def split_parts(files: Sequence[str], first: str) -> tuple[str, ...]:
    """All files of a split model in order, or just the one; none if a part is missing."""
    split = SPLIT.fullmatch(first)
    if split is None:
        return (first,)
    count = int(split["count"])
    parts = [f"{split['prefix']}-{part:05}-of-{count:05}.gguf" for part in range(1, count + 1)]
    return tuple(parts) if set(parts) <= set(files) else ()


def local_snapshot(repository: str) -> Path | None:
    """The directory of a repository's files as they were last downloaded."""
    base = hub_directory() / f"models--{repository.replace('/', '--')}"
    try:
        commit = (base / "refs" / "main").read_text().strip()
    except OSError:
        return None
    snapshot = base / "snapshots" / commit
    return snapshot if commit and snapshot.is_dir() else None


def local_files(snapshot: Path) -> list[str]:
    return sorted(
        path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*.gguf") if path.is_file()
    )


def find_local(name: HubName, file: str | None) -> Path | None:
    """A model of the hub that was downloaded before, by whatever tool."""
    snapshot = local_snapshot(name.repository)
    if snapshot is None:
        return None
    chosen = choose_files(local_files(snapshot), name.quant, file)
    return snapshot / chosen[0] if chosen else None


def pulled_from_hub() -> Iterator[Pulled]:
    for base in sorted(hub_directory().glob("models--*--*")):
        repository = base.name.removeprefix("models--").replace("--", "/", 1)
        snapshot = local_snapshot(repository)
        files = [] if snapshot is None else local_files(snapshot)
        for first in filter(is_first_of_model, files):
            parts = split_parts(files, first)
            if snapshot is None or not parts:
                continue
            quant = QUANT.search(first)
            length = sum((snapshot / part).stat().st_size for part in parts)
            name = f"{repository}:{quant[1]}" if quant else repository
            yield Pulled(name, snapshot / first, length)
