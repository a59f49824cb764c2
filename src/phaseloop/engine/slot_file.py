"""A slot's state in a file: safetensors, with a header that ties it to model and engine.

    ids            int32 [length]     the tokens it is the state of
    part.I         uint8 [length, ..] keys or values: what Snapshot.parts has, in its order
    state.P.I      uint8 [..]         a recurrent state after P tokens, as State.parts

A file is taken only where it would have been written: by the same engine over the same model, so
that what is restored has the bits of what would be computed.  A digest over all of it finds what
was cut or edited.  What was computed with adapters names these by their digests, and can be taken
wherever the same ones are loaded, whatever their ids are there.
"""

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any, TypeAlias, cast

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors import numpy as arrays

from phaseloop.ops.interface import Snapshot, State

from .protocol import SlotFileError
from .settings import Adapters
from .snapshots import Kept

Tensors: TypeAlias = dict[str, NDArray[Any]]

FORMAT = "phaseloop slot 1"
OF_A_FILE = -1  # as Kept.snapshot_id: in no store
PREFIX = ".saving-"  # of files that are being written


class Origin(Struct, frozen=True):
    """Where a state comes from; only there can it go on."""

    model: str  # digest of its file
    engine: str  # name, with all that changes its bits
    position_bytes: int
    state_bytes: int
    adapters: tuple[str, ...] = ()  # digests of those that are loaded, by id

    def as_metadata(self) -> dict[str, str]:
        return {
            "format": FORMAT,
            "model": self.model,
            "engine": self.engine,
            "position_bytes": str(self.position_bytes),
            "state_bytes": str(self.state_bytes),
        }


WORDS = {
    "format": "was written by another version of phaseloop",
    "model": "holds the state of another model",
    "engine": "was computed by another engine, whose bits may differ",
    "position_bytes": "holds keys and values of another size",
    "state_bytes": "holds recurrent states of another size",
}


class Directory(Struct, frozen=True):
    """Implements engine.protocol.SlotFiles."""

    path: Path
    origin: Origin

    def write(self, name: str, state: Kept) -> int:
        return write(self.path / name, state, self.origin)

    def read(self, name: str) -> tuple[Kept, int]:
        path = self.path / name
        return read(path, self.origin), path.stat().st_size


def write(path: Path, kept: Kept, origin: Origin) -> int:
    """Write a state, replacing the file at once and whole; its size in bytes.  Raises OSError."""
    tensors = tensors_of(kept)
    metadata = origin.as_metadata()
    used = [(origin.adapters[adapter], scale) for adapter, scale in kept.adapters]
    metadata["adapters"] = json.dumps(used)
    metadata["digest"] = digest(metadata, tensors)
    number, name = tempfile.mkstemp(prefix=PREFIX, dir=path.parent)
    os.close(number)
    try:
        save(tensors, name, metadata)
        size_bytes = Path(name).stat().st_size
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return size_bytes


def save(tensors: Tensors, name: str, metadata: dict[str, str]) -> None:
    try:
        cast(Any, arrays).save_file(tensors, name, metadata=metadata)
    except SafetensorError as error:  # it wraps what the system says
        raise OSError(str(error)) from error


def read(path: Path, origin: Origin) -> Kept:
    """Raises SlotFileError, OSError."""
    if not path.is_file():
        raise SlotFileError(f"{path.name}: there is no such file")
    try:
        opened = cast(Any, safe_open(path, framework="numpy"))  # its types say nothing
        with opened as file:
            metadata: dict[str, str] = file.metadata() or {}
            check_origin(path, metadata, origin)
            tensors: Tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise SlotFileError(f"{path.name} is no slot file, or a part of one: {error}") from None
    stated = metadata.pop("digest", "")
    if stated != digest(metadata, tensors):
        raise SlotFileError(f"{path.name} was cut or edited: its digest is another; save it again")
    return kept_of(path, tensors, origin, adapters_of(path, metadata, origin))


def adapters_of(path: Path, metadata: dict[str, str], origin: Origin) -> Adapters:
    """Ids, here, of the adapters that a state was computed with."""
    used = msgspec.json.decode(metadata.get("adapters", "[]"), type=tuple[tuple[str, float], ...])
    missing = [name for name, _ in used if name not in origin.adapters]
    if missing:
        what = f"was computed with the adapter of digest {missing[0]}, which is not loaded"
        raise SlotFileError(f"{path.name} {what}; load it with --lora")
    return tuple(sorted((origin.adapters.index(name), scale) for name, scale in used))


def check_origin(path: Path, metadata: dict[str, str], origin: Origin) -> None:
    for key, expected in origin.as_metadata().items():
        found = metadata.get(key, "")
        if found != expected:
            why = WORDS[key]
            raise SlotFileError(
                f"{path.name} {why} ({key} {found or 'missing'}, here {expected}); it can be"
                " restored only where it was saved"
            )


def tensors_of(kept: Kept) -> Tensors:
    tensors: Tensors = {"ids": np.ascontiguousarray(kept.ids)}
    for index, part in enumerate(kept.cells.parts):
        tensors[f"part.{index}"] = np.ascontiguousarray(part)
    for state in kept.cells.states or ():
        for index, part in enumerate(state.parts):
            tensors[f"state.{state.position}.{index}"] = np.ascontiguousarray(part)
    return tensors


def kept_of(path: Path, tensors: Tensors, origin: Origin, adapters: Adapters) -> Kept:
    """From a file whose digest is right, so that only a forger's could be odd."""
    ids = tensors.get("ids")
    if ids is None or ids.dtype != np.int32 or ids.ndim != 1 or not len(ids):
        raise SlotFileError(f"{path.name} names no tokens; save it again")
    parts = numbered(tensors, "part")
    states: dict[int, tuple[NDArray[np.uint8], ...]] = {}
    for name in tensors:
        if name.startswith("state."):
            position = int(name.split(".")[1])
            states[position] = numbered(tensors, f"state.{position}")
    cells_bytes = sum(part.nbytes for part in parts)
    sizes = {sum(part.nbytes for part in state) for state in states.values()}
    if cells_bytes != len(ids) * origin.position_bytes or not sizes <= {origin.state_bytes}:
        raise SlotFileError(
            f"{path.name}: its parts have not the size of its tokens; save it again"
        )
    found = tuple(State(position, states[position]) for position in sorted(states))
    cells = Snapshot(len(ids), parts, found if origin.state_bytes else None)
    return Kept(OF_A_FILE, ids, cells, adapters=adapters)


def numbered(tensors: Tensors, prefix: str) -> tuple[NDArray[np.uint8], ...]:
    parts: list[NDArray[np.uint8]] = []
    while (part := tensors.get(f"{prefix}.{len(parts)}")) is not None:
        parts.append(part.view(np.uint8))
    return tuple(parts)


def digest(metadata: dict[str, str], tensors: Tensors) -> str:
    """Of everything but itself, in an order that no file system or library decides."""
    found = hashlib.sha256()
    for key in sorted(metadata):
        found.update(f"{key}={metadata[key]}\n".encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        found.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode())
        found.update(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)
    return found.hexdigest()
