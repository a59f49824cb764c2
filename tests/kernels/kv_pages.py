"""Caches of keys and values for tests, written and read by NumPy alone."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from phaseloop.kernels.contract import DTYPES
from phaseloop.kernels.host import Memory
from phaseloop.kernels.kv import PAGE, Cache, Kind, plane_shapes

GROUP = 32


def empty_cache(
    kind: Kind, pages: int, heads: int, width: int, memory: Memory | None = None
) -> Cache:
    """All bytes 0xff: NaNs as halves, which no result may show; with `memory`, unreadable ones."""
    planes: dict[str, Any] = {}
    for name, (dtype, shape) in plane_shapes(kind, pages, heads, width).items():
        planes[name] = (memory or Memory()).empty(shape, DTYPES[dtype])
    return Cache(kind, **planes)


def places(
    cache: Cache, pages: NDArray[Any], length: int, start: int = 0
) -> tuple[Any, Any, Any, Any, Any]:
    """Indices of [position, head, dimension] in keys and values, and of the scales."""
    piece, width, heads = piece_of(cache), width_of(cache), cache.keys.shape[1]
    position, head, dim = np.ix_(np.arange(start, length), np.arange(heads), np.arange(width))
    page, token = np.asarray(pages)[position // PAGE], position % PAGE
    keys = (page, head, dim // piece, token, dim % piece)
    values = (page, head, token // piece, dim, token % piece)
    group = np.ix_(np.arange(start, length), np.arange(heads), np.arange(width // GROUP))[2]
    return keys, values, page, token, group


def piece_of(cache: Cache) -> int:
    return 8 if cache.kind == "F16" else 16


def width_of(cache: Cache) -> int:
    return cache.keys.shape[2] * piece_of(cache)


def quantise(x: NDArray[Any]) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """Q8_0 as GGML makes it: -> codes like x, scales [..., width / 32]."""
    groups = x.astype(np.float32).reshape(*x.shape[:-1], -1, GROUP)
    scales = np.abs(groups).max(axis=-1) / np.float32(127)
    with np.errstate(divide="ignore"):
        inverse = np.where(scales > 0, np.float32(1) / scales, np.float32(0))
    scaled = groups * inverse[..., None]
    codes = np.trunc(scaled + np.copysign(np.float32(0.5), scaled)).astype(np.int8)
    return codes.reshape(x.shape), scales.astype(np.float16)


def write_cache(
    cache: Cache, pages: NDArray[Any], keys: NDArray[Any], values: NDArray[Any], start: int = 0
) -> None:
    """keys, values [positions, heads, width] from position `start` on."""
    length = start + len(keys)
    key_at, value_at, page, token, group = places(cache, pages, length, start)
    head = np.arange(keys.shape[1])[None, :, None]
    for x, at, elements, scales in (
        (keys, key_at, cache.keys, cache.key_scales),
        (values, value_at, cache.values, cache.value_scales),
    ):
        if cache.kind == "F16":
            elements[at] = x
        else:
            elements[at], scales[page, head, group, token] = quantise(x)


def read_cache(cache: Cache, pages: NDArray[Any], length: int, start: int = 0) -> tuple[Any, Any]:
    """-> keys, values f64 [positions, heads, width]; of Q8_0 the products rounded to halves."""
    key_at, value_at, page, token, group = places(cache, pages, length, start)
    if cache.kind == "F16":
        return cache.keys[key_at].astype(np.float64), cache.values[value_at].astype(np.float64)
    head = np.arange(cache.keys.shape[1])[None, :, None]
    read = []
    for at, elements, scales in (
        (key_at, cache.keys, cache.key_scales),
        (value_at, cache.values, cache.value_scales),
    ):
        scale = np.repeat(scales[page, head, group, token], GROUP, axis=-1)
        read.append((elements[at].astype(np.float16) * scale).astype(np.float64))
    return read[0], read[1]
