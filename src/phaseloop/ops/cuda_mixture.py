"""Mixtures of experts: route, sort by expert, multiply by their matrices, combine."""

from msgspec import Struct

from phaseloop.kernels import experts, moe, prefill
from phaseloop.kernels.contract import Launch
from phaseloop.kernels.moe import Assignments, tile_count
from phaseloop.kernels.repack import Packed

from .cuda_emit import Emitter
from .cuda_graph import Gated, Mixed, Node, refuse
from .cuda_program import At, Value


class Sorted(Struct, frozen=True):
    """Where rows went.  A assignments, in tiles of at most `tile`, of one expert each."""

    shares: Value  # f32 [T, U]
    order: Value  # i32 [A]
    place: Value  # i32 [A]
    tiles: Value  # i32 [tiles, 4]
    tile: int

    def values(self) -> tuple[Value, Value, Value]:
        return self.order, self.place, self.tiles

    def at(self, at: At) -> Assignments:
        return Assignments(at(self.order), at(self.place), at(self.tiles))


def shared_gate(node: Node) -> Gated | None:
    """A shared expert by the share that a router of its own gives it, one number per row."""
    if isinstance(node, Gated) and node.activation == "sigmoid":
        return node if node.inputs[0].shape[1:] == (1,) else None
    return None


def mix(to: Emitter, node: Mixed, shared: Gated | None = None) -> Value:
    """-> f32 [T, D], with what a shared expert adds."""
    spec, device = node.spec, to.home(node)
    if spec.activation not in ("silu", "gelu"):
        refuse(f"experts gated by {spec.activation}")
    found = sort(to, node)
    up, first = (spec.gate, node.hidden) if spec.up is None else (spec.up, 0)
    matrices = (
        to.store.matrix(device, spec.gate, 0, node.hidden),
        to.store.matrix(device, up, first, node.hidden),
    )
    x = to.get_on(device, node.inputs[0], "f16")
    g, u = (serve(to, node, found, x, one, is_gathered=True) for one in matrices)
    hidden = to.gate(device, g, u, spec.activation)
    down = to.store.matrix(device, spec.down, 0, node.shape[1])
    answers = serve(to, node, found, hidden, down, is_gathered=False)
    return combine(to, node, found, answers, shared)


def sort(to: Emitter, node: Mixed) -> Sorted:
    spec, device, count = node.spec, to.home(node), node.expert_count
    rows, assigned = node.shape[0], node.shape[0] * spec.used
    tile = experts.rows_of(assigned, count) if to.shape.generated else prefill.TILE
    router = to.store.matrix(device, spec.router, 0, count)
    logits = to.product(device, router, node.inputs[0])
    chosen = to.program.new(device, "i32", rows, spec.used)
    shares = to.program.new(device, "f32", rows, spec.used)
    to.step(
        device,
        (logits, chosen, shares),
        lambda at: (moe.route(at(logits), at(chosen), at(shares), normalise=spec.normalise),),
    )
    found = Sorted(
        shares,
        to.program.new(device, "i32", assigned),
        to.program.new(device, "i32", assigned),
        to.program.new(device, "i32", tile_count(assigned, count, tile), 4),
        tile,
    )
    to.step(
        device,
        (chosen, *found.values()),
        lambda at: (moe.sort_by_expert(at(chosen), found.at(at), expert_count=count, rows=tile),),
    )
    return found


def serve(
    to: Emitter, node: Mixed, found: Sorted, x: Value, weight: Packed, *, is_gathered: bool
) -> Value:
    """Every assignment's row times its expert's matrix -> f32 [A, N]."""
    device, used, count = to.home(node), node.spec.used, node.expert_count
    y = to.program.new(device, "f32", found.order.shape[0], weight.rows // count)

    def make(at: At) -> tuple[Launch, ...]:
        operands = (at(x), weight, found.at(at), at(y))
        if to.shape.generated:
            return (
                experts.experts(
                    *operands,
                    expert_count=count,
                    used=used,
                    rows=found.tile,
                    is_gathered=is_gathered,
                ),
            )
        return (
            prefill.prefill_experts(
                *operands, expert_count=count, used=used, is_gathered=is_gathered
            ),
        )

    to.step(device, (x, y, *found.values()), make)
    return y


def combine(to: Emitter, node: Mixed, found: Sorted, answers: Value, shared: Gated | None) -> Value:
    device = to.home(node)
    more = gate = None
    if shared is not None:
        share = to.get_on(device, shared.inputs[0], "f32")
        gate = share.shaped(share.shape[0])
        more = to.get_on(device, shared.inputs[1], "f32")
    y = to.program.new(device, "f32", *node.shape)
    uses = [one for one in (answers, found.place, found.shares, y, more, gate) if one is not None]
    to.step(
        device,
        uses,
        lambda at: (
            moe.combine(
                at(answers),
                at(found.place),
                at(found.shares),
                at(y),
                shared=None if more is None else at(more),
                gate=None if gate is None else at(gate),
            ),
        ),
    )
    return y
