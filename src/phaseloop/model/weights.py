"""A model's weights and metadata: one GGUF file, or the parts of a split one, as one whole.

Reading metadata is typed: a missing key, a wrong type or a value out of range is a ModelError that
names the key.  Tensors are checked against what an architecture expects before anything computes.
"""

import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import numpy as np
from gguf import GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType
from msgspec import Struct

from phaseloop.ops.interface import Weight

from .gguf_file import GgufFile, ModelError, TensorEntry, Value, open_gguf
from .scales import first_bad_value

SPLIT_NAME = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")
SPLIT_COUNT_MAX = 1024
CONVERT = "convert the model again, with a current converter"
DOWNLOAD = "download the model again"
OTHER = "use another model, or another version of phaseloop"
# Integers and doubles hold no weights; Q8_1 and Q8_K only ever hold activations.
NO_WEIGHTS = frozenset({"I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K"})

T = TypeVar("T", int, float, bool, str)
Progress = Callable[[int, int], None]  # bytes done, bytes in all


class Expected(Struct, frozen=True):
    """A tensor an architecture reads.  Vectors must be F32, matrices may be of any type."""

    shape: tuple[int, ...]
    is_vector: bool = False
    is_optional: bool = False


class Weights(Struct, frozen=True):
    path: Path
    metadata: dict[str, Value]
    tensors: dict[str, Weight]

    @property
    def size_bytes(self) -> int:
        return sum(weight.data.nbytes for weight in self.tensors.values())

    def digest(self) -> str:
        """Of metadata, names, types and shapes, and of samples of the data: cheap, stable."""
        digest = hashlib.blake2b(digest_size=16)
        for key in sorted(self.metadata):
            value = self.metadata[key]
            digest.update(
                repr((key, value.tolist() if isinstance(value, np.ndarray) else value)).encode(
                    "utf-8", "surrogateescape"
                )
            )
        for name in sorted(self.tensors):
            weight = self.tensors[name]
            digest.update(repr((name, weight.kind, weight.shape)).encode())
            stride = max(1, weight.data.size // 4096)
            digest.update(weight.data[::stride].tobytes())
        return digest.hexdigest()

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """A scalar of the metadata.  Integers count as floats where a float is wanted."""
        value = self.metadata.get(key, default)
        if value is None:
            raise self.error(f"key {key} is missing")
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.error(f"key {key} is {describe(value)}, not {NOUNS[kind]}")
        return value

    def count(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """An integer within [low, high]."""
        value = self.get(key, int, default)
        if not low <= value <= high:
            raise self.error(f"key {key} is {value}, possible are {low} to {high}")
        return value

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """A float within [low, high]; not NaN."""
        value = self.get(key, float, default)
        if not low <= value <= high:
            raise self.error(f"key {key} is {value}, possible are {low} to {high}")
        return value

    def error(self, problem: str, remedy: str = CONVERT) -> ModelError:
        return ModelError(f"{self.path}: {problem}; {remedy}")

    def check(self, expected: Mapping[str, Expected]) -> None:
        """Every expected tensor is there, in its shape and a usable type, and no other is.

        A tensor that nobody reads is an error: leaving out a bias would only show as bad answers.
        """
        for name, expectation in expected.items():
            weight = self.tensors.get(name)
            if weight is None:
                if expectation.is_optional:
                    continue
                raise self.error(f"tensor {name} is missing", DOWNLOAD)
            if weight.shape != expectation.shape:
                raise self.error(
                    f"tensor {name} has shape {list(weight.shape)}, its metadata demand "
                    f"{list(expectation.shape)}"
                )
            if expectation.is_vector and weight.kind != "F32":
                raise self.error(f"tensor {name} is {weight.kind}, only F32 is possible here")
            if weight.kind in NO_WEIGHTS:
                raise self.error(f"tensor {name} is {weight.kind}, which holds no weights")
        for name in self.tensors:
            if name not in expected:
                architecture = self.metadata.get("general.architecture")
                what = f"tensor {name} is unknown to architecture {architecture}"
                raise self.error(f"{what}: this variant is not supported", OTHER)

    def check_values(self, progress: Progress = lambda done, total: None) -> None:
        """No NaN and no infinity among values and block scales.  Reads every byte once."""
        done = 0
        for weight in self.tensors.values():
            bad = first_bad_value(weight)
            if bad is not None:
                raise self.error(
                    f"tensor {weight.name}, block {bad}: a scale or value is NaN or infinite",
                    DOWNLOAD,
                )
            done += weight.data.nbytes
            progress(done, self.size_bytes)


NOUNS: dict[type, str] = {int: "an integer", float: "a number", bool: "true or false", str: "text"}


def describe(value: Value) -> str:
    if isinstance(value, list | np.ndarray):
        return f"an array of {len(value)}"
    return repr(value)[:80]


def open_weights(path: Path) -> Weights:
    """Map a GGUF file, or all parts of a split one of which `path` names the first."""
    parts = [open_gguf(part) for part in split_paths(path)]
    first = parts[0]
    check_split(first, len(parts))
    tensors: dict[str, Weight] = {}
    for number, part in enumerate(parts):
        if part.metadata.get("split.no", 0) != number:
            raise ModelError(
                f"{part.path}: key split.no is {part.metadata.get('split.no')!r}, not {number}; "
                "the parts of the model are mixed up, download them again"
            )
        for entry in part.tensors:
            if entry.name in tensors:
                raise ModelError(
                    f"{part.path}: tensor {entry.name} is in an earlier part, too; {DOWNLOAD}"
                )
            tensors[entry.name] = weight_of(part, entry)
    stated = first.metadata.get("split.tensors.count", len(tensors))
    if stated != len(tensors):
        raise ModelError(
            f"{path}: key split.tensors.count is {stated!r}, the parts hold {len(tensors)}; "
            "download them again"
        )
    return Weights(path, first.metadata, tensors)


def check_split(first: GgufFile, part_count: int) -> None:
    stated = first.metadata.get("split.count", 1)
    if (stated or 1) != part_count:
        raise ModelError(
            f"{first.path}: key split.count is {stated!r}, its name says {part_count}; name the "
            "first part, whose name must end in -00001-of-NNNNN.gguf"
        )


def split_paths(path: Path) -> list[Path]:
    found = SPLIT_NAME.match(path.name)
    if found is None:
        return [path]
    count = int(found["count"])
    if not 1 <= count <= SPLIT_COUNT_MAX:
        what = f"its name says {count} parts, 1 to {SPLIT_COUNT_MAX} are possible"
        raise ModelError(f"{path}: {what}; rename it")
    if int(found["number"]) != 1:
        raise ModelError(f"{path}: part {int(found['number'])} of a split model; name the first")
    names = [f"{found['stem']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]
    return [path.with_name(name) for name in names]


def weight_of(file: GgufFile, entry: TensorEntry) -> Weight:
    data = file.data[entry.offset : entry.offset + entry.size_bytes]
    if entry.offset % GGUF_DEFAULT_ALIGNMENT:
        data = aligned_copy(data)  # a file may align less than computing wants
    return Weight(entry.name, GGMLQuantizationType(entry.kind).name, entry.shape, data)


def aligned_copy(
    data: np.ndarray[tuple[int], np.dtype[np.uint8]],
) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    space = np.empty(data.size + GGUF_DEFAULT_ALIGNMENT, np.uint8)
    start = -space.ctypes.data % GGUF_DEFAULT_ALIGNMENT
    copy = space[start : start + data.size]
    copy[:] = data
    return copy
