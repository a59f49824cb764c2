"""Goal: no GGUF file, however broken, does more than raise a ModelError that says what and where.

Method: one small valid file, built byte by byte here, and edits of it: named ones for every kind of
damage, seeded random ones for the rest.  Real files of the writer's are read in the other tests.
"""

import random
import struct

import numpy as np
import pytest

pytest.importorskip("gguf")

from phaseloop.model.gguf_file import ModelError, open_gguf
from phaseloop.model.load import load_model
from phaseloop.model.weights import open_weights

U32, F32, STRING, ARRAY = 4, 6, 8, 9


def text(value):
    return struct.pack("<Q", len(value)) + value


def key(name, kind, value):
    return text(name) + struct.pack("<I", kind) + value


def tensor(name, axes, kind=0, offset=0):
    shape = struct.pack(f"<I{len(axes)}Q", len(axes), *axes)
    return text(name) + shape + struct.pack("<IQ", kind, offset)


KEYS = (
    key(b"general.architecture", STRING, text(b"llama")),
    key(b"llama.block_count", U32, struct.pack("<I", 2)),
    key(b"words", ARRAY, struct.pack("<IQ", STRING, 2) + text(b"one") + text(b"\xff")),
    key(b"scores", ARRAY, struct.pack("<IQ", F32, 2) + struct.pack("<2f", 1.0, 2.0)),
)
TENSORS = (tensor(b"a", (4, 2)), tensor(b"b", (8,), offset=32))


def build(keys=KEYS, tensors=TENSORS, *, magic=b"GGUF", version=3, counts=None, size=64):
    tensor_count, key_count = counts or (len(tensors), len(keys))
    head = magic + struct.pack("<IQQ", version, tensor_count, key_count)
    head += b"".join(keys) + b"".join(tensors)
    return head + b"\0" * (-len(head) % 32) + np.arange(size // 4, dtype=np.float32).tobytes()


def opened(tmp_path, data):
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    return open_gguf(path)


@pytest.mark.parametrize("version", [2, 3])
def test_a_file_is_read(tmp_path, version):
    file = opened(tmp_path, build(version=version))
    assert file.metadata["llama.block_count"] == 2
    assert file.metadata["words"][1].encode("utf-8", "surrogateescape") == b"\xff"
    assert list(file.metadata["scores"]) == [1.0, 2.0]
    first, second = file.tensors
    assert (first.name, first.shape, second.shape) == ("a", (2, 4), (8,))
    values = file.data[second.offset : second.offset + second.size_bytes].view(np.float32)
    assert list(values) == list(range(8, 16))


BROKEN = {
    "magic": (build(magic=b"GGJT"), "GGJT"),
    "version": (build(version=1), "version 1"),
    "big_endian": (build(version=3 << 24), "big-endian"),
    "tensor_count": (build(counts=(1 << 60, 4)), "tensor count is 1152921504606846976"),
    "key_count": (build(counts=(2, 1 << 60)), "key count"),
    "key_twice": (build(keys=(*KEYS, KEYS[1])), "llama.block_count occurs twice"),
    "key_type": (build(keys=(key(b"k", 99, b""), *KEYS)), "key k has the unknown type 99"),
    "key_bool": (build(keys=(key(b"k", 7, b"\2"), *KEYS)), "key k is neither"),
    "text_length": (
        build(keys=(key(b"k", STRING, struct.pack("<Q", 1 << 63)), *KEYS)),
        "key k is 9223372036854775808",
    ),
    "array_length": (
        build(keys=(key(b"k", ARRAY, struct.pack("<IQ", F32, 1 << 62)), *KEYS)),
        "length of key k",
    ),
    "array_of_arrays": (
        build(keys=(key(b"k", ARRAY, struct.pack("<IQ", ARRAY, 1)), *KEYS)),
        "array of the unknown type 9",
    ),
    "no_axes": (build(tensors=(tensor(b"a", ()),)), "tensor a has 0 axes"),
    "five_axes": (build(tensors=(tensor(b"a", (1,) * 5),)), "tensor a has 5 axes"),
    "empty_axis": (build(tensors=(tensor(b"a", (0, 4)),)), "impossible shape"),
    "huge_axes": (build(tensors=(tensor(b"a", (1 << 40, 1 << 40)),)), "impossible shape"),
    "tensor_type": (build(tensors=(tensor(b"a", (4,), kind=77),)), "unknown type 77"),
    "tensor_twice": (build(tensors=(TENSORS[0], tensor(b"a", (4,), 0, 32))), "a occurs twice"),
    "blocks": (
        build(tensors=(tensor(b"a", (33,), kind=2),)),
        "rows of 33 are no Q4_0 blocks of 32",
    ),
    "unaligned": (build(tensors=(tensor(b"a", (4,), offset=4),)), "not aligned"),
    "outside": (build(tensors=(tensor(b"a", (4,), offset=1 << 40),)), "the file ends at"),
    "past_the_end": (build(size=32), "tensor b needs bytes"),
    "overlap": (build(tensors=(tensor(b"a", (4, 4)), TENSORS[1])), "a and b overlap"),
    "alignment": (
        build(keys=(key(b"general.alignment", U32, struct.pack("<I", 24)), *KEYS)),
        "not a power of two",
    ),
    "no_alignment": (
        build(keys=(key(b"general.alignment", U32, struct.pack("<I", 0)), *KEYS)),
        "general.alignment is 0",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_damage_is_named(tmp_path, name):
    data, message = BROKEN[name]
    with pytest.raises(ModelError) as caught:
        opened(tmp_path, data)
    assert message in str(caught.value) and "model.gguf" in str(caught.value)


def test_every_truncation_is_an_error(tmp_path):
    data = build()
    for size in range(len(data)):
        with pytest.raises(ModelError):
            opened(tmp_path, data[:size])


def test_random_damage_is_an_error_or_harmless(tmp_path):
    data, chance, refused = build(), random.Random(7), 0
    for _ in range(1500):
        damaged = bytearray(data)
        for _ in range(chance.randint(1, 4)):
            at, mask = chance.randrange(len(data) - 64), chance.choice((1, 0x80, 0xFF))
            damaged[at] ^= mask
        try:
            opened(tmp_path, bytes(damaged))
            load_model(open_weights(tmp_path / "model.gguf"))
        except ModelError:
            refused += 1
    assert refused == 1500  # even an intact header is no model here: its tensors are missing


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(ModelError, match="No such file"):
        open_gguf(tmp_path / "none.gguf")
