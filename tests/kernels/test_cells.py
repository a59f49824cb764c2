"""Goal: pages that are copied, unpacked or shifted hold what they should; no other page changes.

Method: random sequences in shuffled pages on the host's machine, compared byte by byte, or for
turned keys with ops.rope in float64.  Then faults are planted.
"""

import numpy as np
import pytest
from kv_pages import empty_cache, read_cache, write_cache

from phaseloop.kernels.cells import copy_pages, entries, shift, unpack
from phaseloop.kernels.contract import KernelError
from phaseloop.kernels.host import ORDERS, HostFault
from phaseloop.kernels.kv import PAGE, plane_shapes
from phaseloop.kernels.rope import angles
from phaseloop.ops import rope as oracle
from phaseloop.ops.interface import Rope

HEADS = 2
SOURCE = np.array([3, 0, 4], np.int32)


@pytest.fixture(autouse=True, scope="module")
def loaded(host):
    host.load("cells", entries())


def filled(kind, width, length, pages=8):
    rng = np.random.default_rng(width)
    cache = empty_cache(kind, pages, HEADS, width)
    keys, values = (rng.standard_normal((length, HEADS, width)).astype(np.float16) for _ in "kv")
    write_cache(cache, SOURCE, keys, values)
    return cache


def planes(cache):
    names = plane_shapes(cache.kind, 1, HEADS, 64)
    return {name: getattr(cache, name) for name in names}


def bytes_of(cache):
    return {name: plane.view(np.uint8).copy() for name, plane in planes(cache).items()}


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_copied_pages_are_the_same_and_others_as_they_were(host, kind):
    cache = filled(kind, 96, 600)
    before = bytes_of(cache)
    pairs = np.array([[3, 5], [4, 1]], np.int32)
    for plane in planes(cache).values():
        host.run(copy_pages(plane, pairs))
    for name, after in bytes_of(cache).items():
        assert np.array_equal(after[[5, 1]], before[name][[3, 4]])
        assert np.array_equal(after[[0, 2, 3, 4, 6, 7]], before[name][[0, 2, 3, 4, 6, 7]])


@pytest.mark.parametrize("width", [64, 96, 256])
def test_unpacked_pages_hold_the_products_rounded_once(host, width):
    """Those that attention of generated tokens makes of codes and scales, too."""
    cache = filled("Q8_0", width, 3 * PAGE)
    out = empty_cache("F16", 4, HEADS, width)
    pairs = np.array([[3, 2], [0, 0], [4, 3]], np.int32)
    host.run(unpack(cache, pairs, out))
    expected = read_cache(cache, SOURCE, 3 * PAGE)
    found = read_cache(out, np.array([2, 0, 3]), 3 * PAGE)
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
    assert (out.keys[1].view(np.uint8) == 0xFF).all()


def turned_back(host, rope, count):
    turns = np.empty((1, rope.dimensions // 2, 2), np.float32)
    frequencies = oracle.angles(rope, None, np.array([1]))[0]
    host.run(angles(np.array([[-count]], np.int32), frequencies, turns))
    return turns[0]


TARGET = np.array([3, 6, 2], np.int32)  # the first page stays: nothing of it is dropped


def shifted(host, kind, pairs, width=96, turned=64, **how):
    """600 positions lose 270 .. 399."""
    rope = Rope(turned, 1e4, pairs)
    cache = filled(kind, width, 600)
    before = read_cache(cache, SOURCE, 600)
    others = bytes_of(cache)
    for plane in planes(cache).values():  # what lies before the gap in its page
        host.run(copy_pages(plane, np.array([[0, 6]], np.int32)))
    plan = shift(
        cache, turned_back(host, rope, 130), SOURCE, TARGET,
        pairs=pairs, start=270, count=130, length=600,
    )  # fmt: skip
    host.run(plan, **how)
    return rope, cache, before, others


def shift_error(kind, rope, cache, before):
    """The worst, in units of what is due; infinite where a copy is not exact."""
    keys, values = before
    after = read_cache(cache, TARGET, 470)
    exact = oracle.turn(keys[400:], rope, oracle.angles(rope, None, np.full(200, -130)), 1.0)
    is_copied = np.array_equal(after[1], np.concatenate([values[:270], values[400:]]))
    if not (is_copied and np.array_equal(after[0][:270], keys[:270])):
        return np.inf
    due = 2.0**-10 if kind == "F16" else 0.5 / 127 + 2.0**-9
    return np.abs(after[0][270:] - exact).max() / (due * np.abs(exact).max())


@pytest.mark.parametrize("pairs", ["adjacent", "halves"])
@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_a_shift_moves_values_and_turns_keys_back(host, kind, pairs):
    rope, cache, before, others = shifted(host, kind, pairs)
    assert shift_error(kind, rope, cache, before) <= 1
    for name, after in bytes_of(cache).items():
        assert np.array_equal(after[[0, 1, 3, 4, 5, 7]], others[name][[0, 1, 3, 4, 5, 7]])
    for order in ORDERS[1:]:
        _, again, _, _ = shifted(host, kind, pairs, order=order, seed=6)
        for name, plane in bytes_of(again).items():
            assert np.array_equal(plane, bytes_of(cache)[name])


FAULTS = {
    "a page one off": ("cells.cu", "table + at / PAGE", "table + (at + 1) / PAGE"),
    "positions one off": (
        "cells.cu", "value_scales, source, position + count",
        "value_scales, source, position + count + 1"),
    "the wrong half of a piece": (
        "cells.cu", "octet % 2 ? scaled(codes.z", "octet % 4 ? scaled(codes.z"),
    "scales left behind": ("cells.cu", "store(to.scales + scale_at(to.token, dim), scale AT);", ""),
    "codes without their sign": ("cells.cu", "int(code ^ 0x80) - 128", "int(code)"),
    "keys of another sign": ("kv.cuh", "codes ^= 0x80808080u", "codes ^= 0x80808000u"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(plant, host, fault):
    bad = plant(*FAULTS[fault])
    try:
        rope, cache, before, _ = shifted(bad, "Q8_0", "halves", width=64)
        is_shift_right = shift_error("Q8_0", rope, cache, before) <= 1
    except HostFault:
        return
    cache, out = filled("Q8_0", 64, PAGE), empty_cache("F16", 4, HEADS, 64)
    bad.run(unpack(cache, np.array([[3, 0]], np.int32), out))
    expected, found = read_cache(cache, SOURCE, PAGE), read_cache(out, np.array([0]), PAGE)
    is_unpacked = all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not (is_shift_right and is_unpacked)


def test_what_it_cannot_take_is_refused():
    cache, turns = filled("F16", 64, 1), np.zeros((32, 2), np.float32)

    def plan(**how):
        sizes = {"start": 4, "count": 2, "length": 700} | how
        return shift(cache, turns, SOURCE, TARGET, pairs="halves", **sizes)

    assert plan().grid == (87, 2, 2)  # 694 positions, eight to a block
    for how in ({"start": -1}, {"count": 0}, {"length": 6}, {"length": 769}):
        with pytest.raises(KernelError, match="shift: positions"):
            plan(**how)
    with pytest.raises(KernelError, match="698 positions into 2 pages"):
        shift(cache, turns, SOURCE, TARGET[:2], pairs="halves", start=4, count=2, length=700)
    with pytest.raises(KernelError, match="it goes from Q8_0 to F16"):
        unpack(cache, np.zeros((1, 2), np.int32), cache)
