"""The cache of a layer's keys and values, as cuda/kv.cuh lays it out."""

from typing import Literal, TypeAlias

from msgspec import Struct

from .contract import Array, KernelError, Operand, dims, reads, updates

PAGE = 256  # tokens
WIDTHS = (64, 96, 128, 192, 256)  # of a head, that attention has kernels for
TYPES = {"F16": "KvF16", "Q8_0": "KvQ8"}  # GGML's name -> ours in cuda/kv.cuh

Kind: TypeAlias = Literal["F16", "Q8_0"]


class Cache(Struct, frozen=True):
    """One layer's pages.  What nobody wrote may be anything, NaN included."""

    kind: Kind
    keys: Array
    values: Array
    key_scales: Array | None = None  # of Q8_0
    value_scales: Array | None = None


class Rows(Struct, frozen=True):
    """Where the rows of a batch belong."""

    lanes: Array  # i32 [T], each row's lane
    positions: Array  # i32 [T], in the lane's sequence; negative: nobody's row
    table: Array  # i32 [lanes, pages]: in which page a lane's positions 256 i .. 256 i + 255 lie

    def operands(self) -> tuple[Operand, ...]:
        named = (("lanes", self.lanes), ("positions", self.positions), ("table", self.table))
        return tuple(reads(name, array) for name, array in named)


class Sizes(Struct, frozen=True):
    pages: int
    heads: int
    width: int


def plane_shapes(
    kind: Kind, pages: int, heads: int, width: int
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Of each array of a Cache, its type as `dims` names it and its shape."""
    piece, code = (8, "f16") if kind == "F16" else (16, "i8")
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "keys": (code, (pages, heads, width // piece, PAGE, piece)),
        "values": (code, (pages, heads, PAGE // piece, width, piece)),
    }
    if kind == "Q8_0":
        scales = ("f16", (pages, heads, width // 32, PAGE))
        shapes |= {"key_scales": scales, "value_scales": scales}
    return shapes


def position_bytes(kind: Kind, heads: int, width: int) -> int:
    """What a position takes in one layer's cache: 2 B per element, or 34 B per 32."""
    elements = 2 * heads * width
    return elements * 2 if kind == "F16" else elements // 32 * 34


def sizes_of(cache: Cache) -> Sizes:
    """Raises KernelError unless the arrays are those of a cache."""
    if cache.kind not in TYPES:
        raise KernelError(f"cache: no kernel for {cache.kind}, only for {', '.join(TYPES)}")
    if len(cache.keys.shape) != 5:
        raise KernelError(f"cache: keys of shape {cache.keys.shape}, not of rank 5")
    pages, heads, pieces, _, piece = cache.keys.shape
    width = pieces * piece
    for name, (kind, shape) in plane_shapes(cache.kind, pages, heads, width).items():
        array = plane(cache, name)
        if array is None:
            raise KernelError(f"cache: {cache.kind} needs {name}")
        dims(**{name: (array, f"{kind} {' '.join(map(str, shape))}")})
    return Sizes(pages, heads, width)


def plane(cache: Cache, name: str) -> Array | None:
    return {
        "keys": cache.keys,
        "values": cache.values,
        "key_scales": cache.key_scales,
        "value_scales": cache.value_scales,
    }[name]


def operands(cache: Cache, *, is_written: bool = False) -> tuple[Operand, ...]:
    """In the order that kernels take them: keys, key_scales, values, value_scales."""
    names = ("keys", "key_scales", "values", "value_scales")
    planes = [(name, plane(cache, name)) for name in names]
    return tuple(
        updates(name, array) if is_written and array is not None else reads(name, array)
        for name, array in planes
    )
