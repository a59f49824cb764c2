"""The launches of attention, recurrence, norms and sampling, for the floors in docs/kernels.md."""

from collections.abc import Iterator

from kernel_shapes import Case
from msgspec import Struct

from phaseloop.kernels import (
    attention_decode,
    attention_prefill,
    delta,
    norm,
    sample,
)
from phaseloop.kernels.contract import Planned, ceil_div, planned
from phaseloop.kernels.kv import PAGE, Cache, Kind, plane_shapes

PROMPT_ROWS = 2048


class Shape(Struct, frozen=True):
    model: str
    heads: int
    kv_heads: int
    width: int  # of a head
    columns: int  # of the residual stream
    vocabulary: int


MODELS = (
    Shape("8B", 32, 8, 128, 4096, 128256),
    Shape("27B", 24, 4, 256, 5120, 248320),
)
CONTEXTS = (4096, 32768)
KINDS: tuple[Kind, ...] = ("F16", "Q8_0")


def attention_cases() -> Iterator[Case]:
    for shape in MODELS:
        for length in CONTEXTS:
            for kind in KINDS:
                yield decode_case(shape, kind, length, 1)
            yield decode_case(shape, "F16", length, 4)
            yield prefill_case(shape, length)
        for rows in (1, PROMPT_ROWS):
            yield norm_case(shape, rows)
        yield sample_case(shape)
    yield from (delta_case(rows) for rows in (1, PROMPT_ROWS))


def cache_of(shape: Shape, kind: Kind, length: int) -> Cache:
    sizes = (ceil_div(length, PAGE), shape.kv_heads, shape.width)
    planes = {
        name: planned(dtype, *dims) for name, (dtype, dims) in plane_shapes(kind, *sizes).items()
    }
    return Cache(kind, **planes)


def ints(*shape: int) -> Planned:
    return planned("i32", *shape)


def decode_case(shape: Shape, kind: Kind, length: int, rows: int) -> Case:
    slots = attention_decode.slots_for(length, rows)
    sizes = (1, rows, shape.heads)
    q = planned("f16", *sizes, shape.width)
    scratch = attention_decode.Scratch(
        planned("f32", *sizes, slots, shape.width), planned("f32", *sizes, slots, 2)
    )
    lanes = attention_decode.Lanes(ints(1), ints(1), ints(1, slots))
    launch, _ = attention_decode.attend(
        q, lanes, cache_of(shape, kind, length), scratch, q, scale=1.0
    )
    tiles = attention_decode.tiles_of(rows * shape.heads // shape.kv_heads)
    multiplied = tiles * attention_decode.ROWS * shape.kv_heads  # rows, with those that pad tiles
    name = f"attention to {length} positions, {kind}, rows = {rows}"
    return Case(shape.model, name, launch, 4 * multiplied * shape.width * length, "HMMA")


def prefill_case(shape: Shape, length: int) -> Case:
    q = planned("f16", PROMPT_ROWS, shape.heads, shape.width)
    chunks = attention_prefill.Chunks(ints(1), ints(1), ints(1), ints(1, ceil_div(length, PAGE)))
    launch = attention_prefill.attend(
        q, chunks, cache_of(shape, "F16", length), q, count_max=PROMPT_ROWS, scale=1.0
    )
    seen = PROMPT_ROWS * length - PROMPT_ROWS * (PROMPT_ROWS - 1) // 2  # keys, by all rows
    name = f"attention of a prompt's last {PROMPT_ROWS} of {length} positions"
    return Case(shape.model, name, launch, 4 * shape.heads * shape.width * seen, "HMMA")


def norm_case(shape: Shape, rows: int) -> Case:
    x = planned("f32", rows, shape.columns)
    weight = planned("f32", shape.columns)
    half = planned("f16", rows, shape.columns)
    launch = norm.rms_norm(x, weight, epsilon=1e-6, y_half=half, delta=x)
    name = f"residual + norm [{shape.columns}], rows = {rows}"
    return Case(shape.model, name, launch, 7 * rows * shape.columns, "FP32")


def sample_case(shape: Shape) -> Case:
    slices, candidates = sample.slices_of(shape.vocabulary), 40
    row = {name: planned("f64", 1) for name in ("temperature", "top_p", "min_p")}
    draws = sample.Draws(planned("u64", 1), ints(1), ints(1), ints(1), **row)
    drawn = sample.Drawn(ints(1), ints(1, candidates), planned("f32", 1, candidates))
    launch, _ = sample.sample(
        planned("f32", 1, shape.vocabulary), planned("u64", 1, slices, candidates), draws, drawn
    )
    return Case(shape.model, f"candidates of {shape.vocabulary}", launch, 0, "FP32")


def delta_case(rows: int) -> Case:
    """48 value heads and 16 key heads of 128, of the 27B."""
    heads, width = 48, 128
    gates = planned("f32", rows, heads)
    lanes = delta.Lanes(ints(1), ints(1), ints(1), ints(1))
    launch = delta.recur(
        planned("f32", rows, 80 * width), gates, gates, planned("f32", heads),
        planned("f32", 1, heads, width, width), planned("f32", rows, heads, width), lanes,
    )  # fmt: skip
    return Case(
        "27B", f"delta net, rows = {rows}", launch, 7 * rows * heads * width * width, "FP32"
    )
