"""Reads the header of one GGUF file, believing nothing: metadata, and where each tensor lies.

Layout, little-endian: magic, version (2 or 3), tensor count, key count; per key its name, type and
value; per tensor its name, shape, type and offset; then, aligned, the data.  Every count is checked
against the bytes that are left before it is used, so a broken file costs an error and not memory.
"""

import mmap
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from msgspec import Struct
from numpy.typing import NDArray

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT_DEFAULT = 32
ALIGNMENT_MAX = 1 << 20
AXIS_COUNT_MAX = 4
NAME_BYTES_MAX = 65_535
MESSAGE_LENGTH_MAX = 600  # characters
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "?", 10: "<Q", 11: "<q"}
SCALARS[12] = "<d"
ENTRY_BYTES_MIN = 13  # of a key: empty name, type, one byte

Array: TypeAlias = NDArray[np.generic]
Value: TypeAlias = int | float | bool | str | list[str] | Array


class ModelError(Exception):
    """A model file that cannot be used: names the file, the key or tensor, and the remedy.

    Names come from the file.  What no terminal should be sent is escaped, and what would bury the
    rest is cut out of the middle.
    """

    def __init__(self, message: str) -> None:
        shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in message)
        if len(shown) > MESSAGE_LENGTH_MAX:
            shown = f"{shown[: MESSAGE_LENGTH_MAX // 2]} ... {shown[-MESSAGE_LENGTH_MAX // 2 :]}"
        super().__init__(shown)


class TensorEntry(Struct, frozen=True):
    """A tensor as the header describes it; checked to lie inside the file."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]  # row-major
    offset: int  # bytes from the start of the file
    size_bytes: int


class GgufFile(Struct, frozen=True):
    path: Path
    metadata: dict[str, Value]
    tensors: tuple[TensorEntry, ...]
    data: NDArray[np.uint8]  # the whole file, memory-mapped


def open_gguf(path: Path) -> GgufFile:
    """Raises ModelError; OSError becomes one, too."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            if size < 24:
                raise ModelError(f"{path}: {size} bytes are too few for a GGUF file{AGAIN}")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror or error}; check the path with -m") from error
    header = Header(path, memoryview(data))
    metadata, tensors = header.read()
    return GgufFile(path, metadata, tensors, np.frombuffer(data, np.uint8))


AGAIN = "; download it again"


class Header:
    """A cursor over the bytes.  Each read says what it was reading when it fails."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self._path = path
        self._data = data
        self._at = 0

    def read(self) -> tuple[dict[str, Value], tuple[TensorEntry, ...]]:
        tensor_count, key_count = self._read_preamble()
        metadata: dict[str, Value] = {}
        for index in range(key_count):
            key = self._string(f"name of key {index}", NAME_BYTES_MAX)
            if key in metadata:
                raise self._error(f"key {key} occurs twice")
            metadata[key] = self._value(f"key {key}", self._scalar("<I", f"type of key {key}"))
        entries = [self._tensor(index) for index in range(tensor_count)]
        return metadata, self._placed(entries, self._alignment(metadata))

    def _read_preamble(self) -> tuple[int, int]:
        magic = bytes(self._take(4, "magic"))
        if magic != MAGIC:
            raise self._error(
                f"not a GGUF file: it begins with {magic!r}; convert the model to GGUF first", ""
            )
        version = self._scalar("<I", "version")
        if version not in VERSIONS:
            big = version & 0xFFFF == 0
            raise self._error(
                f"GGUF version {version}{' (big-endian)' if big else ''} is not supported, "
                "only 2 and 3 are; convert the model anew",
                "",
            )
        tensor_count = self._count("tensor count", ENTRY_BYTES_MIN)
        return tensor_count, self._count("key count", ENTRY_BYTES_MIN)

    def _value(self, what: str, kind: int) -> Value:
        if kind == STRING:
            return self._string(what)
        if kind == ARRAY:
            return self._array(what)
        if kind not in SCALARS:
            raise self._error(f"{what} has the unknown type {kind}")
        if kind == 7 and self._data[self._at : self._at + 1].tobytes() not in (b"\0", b"\1"):
            raise self._error(f"{what} is neither true nor false")
        return self._scalar(SCALARS[kind], what)

    def _array(self, what: str) -> list[str] | Array:
        kind = self._scalar("<I", f"element type of {what}")
        if kind == STRING:
            count = self._count(f"length of {what}", 8)
            return [self._string(f"{what}, element {index}") for index in range(count)]
        if kind not in SCALARS:
            raise self._error(f"{what} is an array of the unknown type {kind}")
        dtype = np.dtype(SCALARS[kind])
        count = self._count(f"length of {what}", dtype.itemsize)
        return np.frombuffer(self._take(count * dtype.itemsize, what), dtype)

    def _tensor(self, index: int) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
        name = self._string(f"name of tensor {index}", NAME_BYTES_MAX)
        axis_count = self._scalar("<I", f"axis count of tensor {name}")
        if not 1 <= axis_count <= AXIS_COUNT_MAX:
            raise self._error(f"tensor {name} has {axis_count} axes, 1 to 4 are possible")
        axes = [self._scalar("<Q", f"shape of tensor {name}") for _ in range(axis_count)]
        number = self._scalar("<I", f"type of tensor {name}")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise self._error(f"tensor {name} has the unknown type {number}", UPDATE) from None
        return name, kind, tuple(reversed(axes)), self._scalar("<Q", f"offset of tensor {name}")

    def _placed(
        self, entries: list[tuple[str, GGMLQuantizationType, tuple[int, ...], int]], alignment: int
    ) -> tuple[TensorEntry, ...]:
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, TensorEntry] = {}
        for name, kind, shape, offset in entries:
            if name in tensors:
                raise self._error(f"tensor {name} occurs twice")
            size_bytes = self._size_bytes(name, kind, shape)
            if offset % alignment:
                raise self._error(f"tensor {name} at offset {offset} is not aligned to {alignment}")
            if start + offset + size_bytes > len(self._data):
                raise self._error(
                    f"tensor {name} needs bytes {start + offset} to {start + offset + size_bytes}, "
                    f"the file ends at {len(self._data)}"
                )
            tensors[name] = TensorEntry(name, kind, shape, start + offset, size_bytes)
        placed = sorted(tensors.values(), key=lambda tensor: tensor.offset)
        for before, after in pairwise(placed):
            if before.offset + before.size_bytes > after.offset:
                raise self._error(f"tensors {before.name} and {after.name} overlap")
        return tuple(tensors.values())

    def _size_bytes(self, name: str, kind: GGMLQuantizationType, shape: tuple[int, ...]) -> int:
        block, block_bytes = GGML_QUANT_SIZES[kind]
        count = 1
        for axis in shape:
            count *= axis
        if min(shape) < 1 or count > len(self._data) * 64:  # no type packs 64 values into a byte
            raise self._error(f"tensor {name} has the impossible shape {list(shape)}")
        if shape[-1] % block:
            raise self._error(
                f"tensor {name}: rows of {shape[-1]} are no {kind.name} blocks of {block}"
            )
        return count // block * block_bytes

    def _alignment(self, metadata: dict[str, Value]) -> int:
        alignment = metadata.get("general.alignment", ALIGNMENT_DEFAULT)
        if not isinstance(alignment, int) or not 1 <= alignment <= ALIGNMENT_MAX:
            raise self._error(f"key general.alignment is {alignment!r}")
        if alignment & (alignment - 1):
            raise self._error(f"key general.alignment is {alignment}, not a power of two")
        return alignment

    def _string(self, what: str, bytes_max: int | None = None) -> str:
        size = self._count(what, 1)
        if bytes_max is not None and size > bytes_max:
            raise self._error(f"{what} is {size} bytes long, at most {bytes_max} are possible")
        # Vocabularies hold bytes that are no UTF-8; surrogates keep them apart and recoverable.
        return str(self._take(size, what), "utf-8", "surrogateescape")

    def _count(self, what: str, bytes_each: int) -> int:
        count = self._scalar("<Q", what)
        if count * bytes_each > len(self._data) - self._at:
            raise self._error(f"{what} is {count}, more than the file can hold")
        return count

    def _scalar(self, layout: str, what: str) -> Any:  # noqa: ANN401  struct knows, types do not
        return struct.unpack(layout, self._take(struct.calcsize(layout), what))[0]

    def _take(self, size: int, what: str) -> memoryview:
        if size > len(self._data) - self._at:
            raise self._error(f"the file ends inside {what}")
        self._at += size
        return self._data[self._at - size : self._at]

    def _error(self, problem: str, remedy: str = AGAIN) -> ModelError:
        return ModelError(f"{self._path}: {problem}{remedy}")


UPDATE = "; this release does not know it, use another quantisation of the model"
