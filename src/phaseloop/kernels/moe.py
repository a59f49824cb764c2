"""moe: wrapper of cuda/moe.cu, where shapes, numerics, mapping and roofline are stated."""

from msgspec import Struct

from .contract import Array, KernelError, Launch, ceil_div, dims, i32, reads, writes

THREADS = 256
SORT_THREADS = 1024
WARPS = THREADS // 32
PACK = 4
EXPERTS_MAX = 512
USED_MAX = 32
ROWS_MAX = 65535


class Assignments(Struct, frozen=True):
    """Rows sorted by the experts that serve them; assignment a = t U + j."""

    order: Array  # i32 [A], the assignment at each place
    place: Array  # i32 [A], the place of each assignment
    tiles: Array  # i32 [tiles, 4], see `tile_count`


def tile_count(assignments: int, experts: int, rows: int) -> int:
    """How many tiles of at most `rows` assignments there can be, each of one expert."""
    return min(assignments, assignments // rows + experts)


def route(logits: Array, experts: Array, shares: Array, *, normalise: bool) -> Launch:
    """Choose experts.  logits f32 [T, E]; experts i32 [T, U], shares f32 [T, U], highest first."""
    d = dims(logits=(logits, "f32 T E"), experts=(experts, "i32 T U"), shares=(shares, "f32 T U"))
    check_experts(d["E"])
    if not 1 <= d["U"] <= min(USED_MAX, d["E"]):
        raise KernelError(f"route: {d['U']} of {d['E']} experts per row, at most {USED_MAX}")
    return Launch(
        "moe",
        "route",
        (ceil_div(d["T"], WARPS), 1, 1),
        (THREADS, 1, 1),
        (
            reads("logits", logits),
            writes("experts", experts),
            writes("shares", shares),
            i32("normalise", normalise),
            i32("T", d["T"]),
            i32("E", d["E"]),
            i32("U", d["U"]),
        ),
    )


def sort_by_expert(experts: Array, into: Assignments, *, expert_count: int, rows: int) -> Launch:
    """experts i32 [T, U], each below `expert_count`; tiles of at most `rows` assignments."""
    d = dims(experts=(experts, "i32 T U"))
    count = d["T"] * d["U"]
    tiles = tile_count(count, expert_count, rows)
    dims(
        order=(into.order, f"i32 {count}"),
        place=(into.place, f"i32 {count}"),
        tiles=(into.tiles, f"i32 {tiles} 4"),
    )
    check_experts(expert_count)
    return Launch(
        "moe",
        "sort_by_expert",
        (1, 1, 1),
        (SORT_THREADS, 1, 1),
        (
            reads("experts", experts),
            writes("order", into.order),
            writes("place", into.place),
            writes("tiles", into.tiles),
            i32("A", count),
            i32("E", expert_count),
            i32("rows", rows),
            i32("tile_count", tiles),
        ),
    )


def combine(
    x: Array,
    place: Array,
    shares: Array,
    y: Array,
    *,
    shared: Array | None = None,
    gate: Array | None = None,
) -> Launch:
    """Sum what the experts answered.  x f32 [A, D] by place; shares f32 [T, U]; y f32 [T, D];

    shared f32 [T, D] is added by sigmoid(gate), f32 [T]; both or neither.
    """
    d = dims(shares=(shares, "f32 T U"), y=(y, "f32 T D"))
    count = d["T"] * d["U"]
    dims(x=(x, f"f32 {count} {d['D']}"), place=(place, f"i32 {count}"))
    if (shared is None) != (gate is None):
        raise KernelError("combine: a shared expert and its gate come together")
    if shared is not None and gate is not None:
        dims(y=(y, "f32 T D"), shared=(shared, "f32 T D"), gate=(gate, "f32 T"))
    if d["D"] % PACK or d["T"] > ROWS_MAX:
        raise KernelError(f"combine: {d['T']} rows of {d['D']}; at most {ROWS_MAX}, of fours")
    return Launch(
        "moe",
        "combine",
        (ceil_div(d["D"], THREADS * PACK), d["T"], 1),
        (THREADS, 1, 1),
        (
            reads("x", x),
            reads("place", place),
            reads("shares", shares),
            reads("shared", shared),
            reads("gate", gate),
            writes("y", y),
            i32("U", d["U"]),
            i32("D", d["D"]),
        ),
    )


def check_experts(count: int) -> None:
    if not 1 <= count <= EXPERTS_MAX:
        raise KernelError(f"moe: {count} experts, at most {EXPERTS_MAX}")


def entries() -> list[str]:
    return ["route", "sort_by_expert", "combine"]
