"""Takes a GGUF file apart and puts it together again, as it was or with any part made wrong."""

import struct
from pathlib import Path

from msgspec import Struct

ALIGNMENT = 32
U32, I32, F32, BOOL, STRING, ARRAY, U64, F64 = 4, 5, 6, 7, 8, 9, 10, 12
LAYOUTS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", U32: "<I", I32: "<i", F32: "<f", BOOL: "<?"}
LAYOUTS |= {U64: "<Q", 11: "<q", F64: "<d"}


class Key(Struct):
    name: str
    kind: int
    payload: bytes


class Tensor(Struct):
    name: str
    axes: list[int]  # the fastest first, as the file has them
    kind: int
    offset: int  # from the start of the data


class Parts(Struct):
    """`pack` writes what the parts say, whether it makes sense or not."""

    keys: list[Key]
    tensors: list[Tensor]
    data: bytes
    magic: bytes = b"GGUF"
    version: int = 3
    tensor_count: int | None = None  # None: as many as there are
    key_count: int | None = None

    def pack(self) -> bytes:
        counts = (
            len(self.tensors) if self.tensor_count is None else self.tensor_count,
            len(self.keys) if self.key_count is None else self.key_count,
        )
        head = [self.magic, struct.pack("<IQQ", self.version, *counts)]
        for key in self.keys:
            head += (text(key.name), struct.pack("<I", key.kind), key.payload)
        for one in self.tensors:
            axes = struct.pack(f"<I{len(one.axes)}Q", len(one.axes), *one.axes)
            head += (text(one.name), axes, struct.pack("<IQ", one.kind, one.offset))
        whole = b"".join(head)
        return whole + b"\0" * (-len(whole) % ALIGNMENT) + self.data

    def key(self, name: str) -> Key:
        return next(key for key in self.keys if key.name == name)

    def tensor(self, name: str) -> Tensor:
        return next(tensor for tensor in self.tensors if tensor.name == name)


def text(value: str) -> bytes:
    content = value.encode()
    return struct.pack("<Q", len(content)) + content


def scalar(kind: int, value: float) -> bytes:
    return struct.pack(LAYOUTS[kind], value)


class Cursor:
    def __init__(self, content: bytes) -> None:
        self.content, self.at = content, 0

    def take(self, size: int) -> bytes:
        self.at += size
        return self.content[self.at - size : self.at]

    def number(self, layout: str) -> int:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def text(self) -> str:
        return self.take(self.number("<Q")).decode()

    def value(self, kind: int) -> bytes:
        """The bytes of one value of metadata."""
        start = self.at
        if kind == STRING:
            self.text()
        elif kind == ARRAY:
            of, count = self.number("<I"), self.number("<Q")
            for _ in range(count):
                self.value(of)
        else:
            self.take(struct.calcsize(LAYOUTS[kind]))
        return self.content[start : self.at]


def taken_apart(path: Path) -> Parts:
    """Of a sound file with the usual alignment."""
    content = path.read_bytes()
    cursor = Cursor(content)
    magic, version = cursor.take(4), cursor.number("<I")
    tensor_count, key_count = cursor.number("<Q"), cursor.number("<Q")
    keys: list[Key] = []
    for _ in range(key_count):
        name, kind = cursor.text(), cursor.number("<I")
        keys.append(Key(name, kind, cursor.value(kind)))
    tensors: list[Tensor] = []
    for _ in range(tensor_count):
        name = cursor.text()
        axes = [cursor.number("<Q") for _ in range(cursor.number("<I"))]
        tensors.append(Tensor(name, axes, cursor.number("<I"), cursor.number("<Q")))
    start = -(-cursor.at // ALIGNMENT) * ALIGNMENT
    parts = Parts(keys, tensors, content[start:], magic, version)
    assert parts.pack() == content, "nothing is lost"
    return parts
