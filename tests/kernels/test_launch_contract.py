"""Goal: a launch is planned from operands that fit, and every misfit is named.

Method: `dims` and the arrays of plans against NumPy's own shapes and strides; sources and caches in
directories of their own.
"""

import re

import numpy as np
import pytest

from phaseloop.kernels.contract import (
    KernelError,
    Launch,
    dims,
    f32,
    i32,
    planned,
    reads,
    traffic_bytes,
    updates,
    writes,
)
from phaseloop.kernels.sources import build_directory, digest, included, source_directory

HEADER = ("Shapes", "Numerics", "Mapping", "Roofline", "Measured")
RAW = re.compile(
    r"__(shared__|syncthreads|syncwarp|ldg|shfl|ballot|half2?\w*2\w+)|\\basm\\b|printf"
)
SOURCES = sorted(source_directory().glob("*.cu"))


def test_sizes_are_bound_across_operands():
    x, w = np.empty((4, 64), np.float16), np.empty((32, 64), np.float32)
    assert dims(x=(x, "f16 M K"), w=(w, "f32 N K")) == {"M": 4, "K": 64, "N": 32}
    assert dims(x=(planned("i32", 7, 2), "i32 T 2")) == {"T": 7}


@pytest.mark.parametrize(
    ("array", "spec", "words"),
    [
        (np.empty((4, 64), np.float32), "f16 M K", "x: expected f16 M K, got float32 (4, 64)"),
        (np.empty(64, np.float16), "f16 M K", "x: expected f16 M K, got float16 (64,)"),
        (np.empty((4, 32), np.float16), "f16 M K", "x: K is 64 elsewhere, 32 here"),
        (np.empty((4, 64), np.float16), "f16 M 32", "x: 32 is 32 elsewhere, 64 here"),
        (np.empty((4, 128), np.float16)[:, ::2], "f16 M K", "x: must be C-contiguous"),
        (np.empty((64, 4), np.float16).T, "f16 M K", "x: must be C-contiguous"),
    ],
)
def test_a_misfit_is_named(array, spec, words):
    with pytest.raises(KernelError, match=re.escape(words)):
        dims(w=(np.empty((2, 64), np.float32), "f32 N K"), x=(array, spec))


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4)])
def test_planned_arrays_have_numpys_strides(shape):
    for kind, dtype in (("f16", np.float16), ("u8", np.uint8), ("f32", np.float32)):
        array, other = planned(kind, *shape), np.empty(shape, dtype)
        assert (array.strides, array.nbytes) == (other.strides, other.nbytes)


def test_traffic_counts_each_operand_and_updates_twice():
    launch = Launch(
        "toy",
        "toy",
        (1, 1, 1),
        (32, 1, 1),
        (
            reads("x", planned("f16", 10)),
            reads("missing", None),
            writes("y", planned("f32", 10)),
            updates("z", planned("f32", 10)),
            i32("n", 1),
            f32("scale", 0.5),
        ),
    )
    assert traffic_bytes(launch) == 20 + 40 + 80


def test_a_digest_knows_what_is_included(tmp_path):
    source, header = tmp_path / "a.cu", tmp_path / "b.cuh"
    source.write_text('#include "b.cuh"\n#include "common.cuh"\n')
    header.write_text('#include "a.cu"\n')  # a circle ends
    names = [path.name for path in included(source)]
    assert names[:3] == ["a.cu", "b.cuh", "common.cuh"]
    before = digest([source], "x")
    assert digest([source], "x") == before
    assert digest([source], "y") != before
    header.write_text('#include "a.cu"\n// changed\n')
    assert digest([source], "x") != before


def test_a_source_that_is_missing_is_named(tmp_path):
    with pytest.raises(KernelError, match=r"nowhere\.cu: No such file"):
        digest([tmp_path / "nowhere.cu"])


def test_the_cache_may_lie_elsewhere_but_not_in_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv("PHASELOOP_KERNEL_CACHE", str(tmp_path / "deep" / "cache"))
    assert build_directory() == tmp_path / "deep" / "cache"
    assert build_directory().is_dir()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PHASELOOP_KERNEL_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(KernelError, match="PHASELOOP_KERNEL_CACHE may name another directory"):
        build_directory()
    monkeypatch.delenv("PHASELOOP_KERNEL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build_directory() == tmp_path / "phaseloop" / "kernels"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_a_source_states_its_contract_and_keeps_to_the_primitives(path):
    """The header's fields in their order, its wrapper, and no way round the checked accessors."""
    text = path.read_text()
    head = text[: text.index("\n#include")]
    assert text.startswith(f"// {path.stem}: ")
    assert f"Wrapper: phaseloop/kernels/{path.stem.removesuffix('_f32')}" in head
    places = [head.index(f"\n// {field}") for field in HEADER]
    assert places == sorted(places)
    for number, line in enumerate(text.splitlines(), start=1):
        assert len(line) <= 100, f"line {number}"
        code = line.split("//")[0]
        assert not RAW.search(code), f"line {number} bypasses common.cuh"
