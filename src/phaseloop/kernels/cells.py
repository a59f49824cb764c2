"""cells: wrapper of cuda/cells.cu, where shapes, numerics, mapping and roofline are stated."""

from typing import Literal

from .contract import (
    Array,
    KernelError,
    Launch,
    ceil_div,
    check_contiguous,
    dims,
    i32,
    reads,
    updates,
)
from .kv import PAGE, TYPES, Cache, operands, sizes_of
from .rope import check_widths

THREADS = 256
WARPS = THREADS // 32
WORD = 16  # bytes
GRID_MAX = 65535  # of y and z


def copy_pages(plane: Array, pairs: Array) -> Launch:
    """Copy pages of one array of a cache.  pairs i32 [P, 2], from and to; none is in two roles."""
    count = dims(pairs=(pairs, "i32 P 2"))["P"]
    check_contiguous("plane", plane)
    words = plane.nbytes // plane.shape[0] // WORD
    if words * WORD * plane.shape[0] != plane.nbytes or count > GRID_MAX:
        raise KernelError(f"copy_pages: {count} pages of a plane {plane.dtype} {plane.shape}")
    return Launch(
        "cells",
        "copy_pages",
        (ceil_div(words, THREADS), count, 1),
        (THREADS, 1, 1),
        (updates("plane", plane), reads("pairs", pairs), i32("page_words", words)),
    )


def unpack(cache: Cache, pairs: Array, out: Cache) -> Launch:
    """Pages of a Q8_0 cache as pages of an F16 one.  pairs i32 [P, 2], from and to."""
    if (cache.kind, out.kind) != ("Q8_0", "F16"):
        raise KernelError(f"unpack: from {cache.kind} to {out.kind}; it goes from Q8_0 to F16")
    sizes, sizes_out = sizes_of(cache), sizes_of(out)
    if (sizes.heads, sizes.width) != (sizes_out.heads, sizes_out.width):
        raise KernelError(f"unpack: from {sizes} to {sizes_out}")
    count = dims(pairs=(pairs, "i32 P 2"))["P"]
    if 2 * count > GRID_MAX:
        raise KernelError(f"unpack: {count} pages at once; at most {GRID_MAX // 2}")
    return Launch(
        "cells",
        "unpack",
        (ceil_div(sizes.width * PAGE // 8, THREADS), sizes.heads, 2 * count),
        (THREADS, 1, 1),
        (
            *operands(cache),
            reads("pairs", pairs),
            updates("keys_out", out.keys),
            updates("values_out", out.values),
            i32("heads", sizes.heads),
            i32("D", sizes.width),
        ),
    )


def shift(
    cache: Cache,
    turns: Array,
    source: Array,
    target: Array,
    *,
    pairs: Literal["adjacent", "halves"],
    start: int,
    count: int,
    length: int,
) -> Launch:
    """Drop [start, start + count) of a sequence of `length` positions.

    turns f32 [P, 2], of -count positions (rope.angles); source, target i32 [pages]: the sequence's
    page table before and after, which share no page from `start` on.  What lies before `start` in
    a page that changes, copy_pages brings.
    """
    sizes = sizes_of(cache)
    d = dims(
        turns=(turns, "f32 P 2"), source=(source, "i32 pages"), target=(target, "i32 pages_after")
    )
    check_widths(sizes.width, 2 * d["P"], sizes.width, sizes.width)
    if not 0 <= start < start + count < length <= d["pages"] * PAGE:
        raise KernelError(
            f"shift: positions {start} to {start + count} of {length}, {d['pages']} pages"
        )
    if length - count > d["pages_after"] * PAGE:
        raise KernelError(f"shift: {length - count} positions into {d['pages_after']} pages")
    return Launch(
        "cells",
        f"shift<{TYPES[cache.kind]}, {'true' if pairs == 'adjacent' else 'false'}>",
        (ceil_div(length - count - start, WARPS), sizes.heads, 2),
        (THREADS, 1, 1),
        (
            *operands(cache, is_written=True),
            reads("turns", turns),
            reads("source", source),
            reads("target", target),
            i32("start", start),
            i32("count", count),
            i32("length", length),
            i32("heads", sizes.heads),
            i32("D", sizes.width),
            i32("R", 2 * d["P"]),
        ),
    )


def entries() -> list[str]:
    shifts = [f"shift<{kind}, {a}>" for kind in TYPES.values() for a in ("true", "false")]
    return ["copy_pages", "unpack", *shifts]
