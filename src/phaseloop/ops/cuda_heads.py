"""Attention: heads to queries, keys and values, to the cache, and what they attend to."""

from msgspec import Struct

from phaseloop.kernels import activation, attention_decode, attention_prefill, cells, rope
from phaseloop.kernels.attention_decode import Lanes, Scratch, slots_for
from phaseloop.kernels.attention_prefill import Chunks
from phaseloop.kernels.kv import PAGE, Cache, Rows

from .cuda_emit import Emitter
from .cuda_graph import Attended, Flat, Heads, Node, Norm, Part, Turned, refuse
from .cuda_program import Value
from .interface import Rope
from .rope import magnitude


class Chain(Struct, frozen=True):
    """What heads go through before they attend; `source` gives them `stride` wide each."""

    source: Node
    stride: int
    norm: Norm | None
    rope: Rope | None


def chain_of(node: Node) -> Chain:
    turn = norm = None
    if isinstance(node, Turned):
        turn, node = node.rope, node.inputs[0]
    if isinstance(node, Norm):
        norm, node = node, node.inputs[0]
    if isinstance(node, Part) and node.first == 0:
        node = node.inputs[0]
    if not isinstance(node, Heads):
        refuse("heads that are made in another way")
    return Chain(node.inputs[0], node.shape[-1], norm, turn)


def keep(to: Emitter, node: Attended) -> None:
    """Write keys and values to the cache; the queries are ready afterwards."""
    q, k, v = (chain_of(one) for one in node.inputs)
    width, kv_heads = node.inputs[2].shape[2], node.inputs[2].shape[1]
    turn = q.rope
    if turn is None or turn != k.rope or v.rope or v.norm or k.stride != width:
        refuse("attention without positions, or with others for queries than for keys")
    device = to.home(node)
    rows, heads = node.shape[0], node.inputs[0].shape[1]
    query = to.get_on(device, q.source, "f32").shaped(rows, heads, q.stride)
    key, value = (
        to.get_on(device, one.source, "f32").shaped(rows, kv_heads, width) for one in (k, v)
    )
    q_weight, k_weight = (
        None if one.norm is None else to.store.vector(device, one.norm.weight) for one in (q, k)
    )
    turns = turns_of(to, device, turn)
    inputs, cache = to.inputs[device], to.store.cache(device, node.layer)
    out = to.program.new(device, "f16", rows, heads, width)
    to.step(
        device,
        (query, key, value, turns, out),
        lambda at: (
            rope.rope_kv(
                at(query),
                at(key),
                at(value),
                at(turns),
                Rows(inputs.lanes, inputs.places, inputs.table),
                cache,
                at(out),
                pairs=turn.pairs,
                q_weight=q_weight,
                k_weight=k_weight,
                epsilon=q.norm.epsilon if q.norm else 0.0,
            ),
        ),
    )
    to.queries[id(node)] = out


def turns_of(to: Emitter, device: int, turn: Rope) -> Value:
    """Angles of the rows' positions, once per pass and device."""
    key = (device, turn)
    if key not in to.turns:
        positions = to.inputs[device].positions
        frequencies = to.store.frequencies(device, turn)
        _, rows = positions.shape
        turns = to.program.new(device, "f32", rows, turn.dimensions // 2, 2)
        to.step(
            device,
            (turns,),
            lambda at: (rope.angles(positions, frequencies, at(turns), factor=magnitude(turn)),),
        )
        to.turns[key] = turns
    return to.turns[key]


def attend(to: Emitter, node: Attended) -> Value:
    """-> f16 [T, H * D]."""
    queries = to.queries[id(node)]
    y = to.program.new(queries.storage.device, "f16", *queries.shape)
    if to.shape.generated:
        attend_generated(to, node, queries, y)
    else:
        attend_prompt(to, node, queries, y)
    return y.shaped(*node.shape)


def attend_prompt(to: Emitter, node: Attended, queries: Value, y: Value) -> None:
    device, spec = queries.storage.device, node.spec
    inputs, cache = to.inputs[device], to.store.cache(device, node.layer)
    table = inputs.table
    if cache.kind == "Q8_0":
        packed, cache, table = cache, to.store.unpacked(device), inputs.table_unpacked
        unpack(to, device, packed, cache)
    chunks = Chunks(inputs.firsts, inputs.starts, inputs.counts, table)
    to.step(
        device,
        (queries, y),
        lambda at: (
            attention_prefill.attend(
                at(queries),
                chunks,
                cache,
                at(y),
                count_max=to.shape.count_max,
                scale=spec.scale,
                window=spec.window,
                cap=spec.cap,
            ),
        ),
    )


def unpack(to: Emitter, device: int, packed: Cache, cache: Cache) -> None:
    pairs = to.inputs[device].pairs
    to.step(device, (), lambda at: (cells.unpack(packed, pairs, cache),))


def attend_generated(to: Emitter, node: Attended, queries: Value, y: Value) -> None:
    """Lanes of equally many rows together; which lanes, shows in no bit."""
    first_lane = first_row = 0
    for lanes, rows in to.shape.groups:
        attend_group(to, node, queries.rows(first_row, lanes * rows),
                     y.rows(first_row, lanes * rows), (first_lane, lanes, rows))  # fmt: skip
        first_lane += lanes
        first_row += lanes * rows


def attend_group(
    to: Emitter, node: Attended, queries: Value, y: Value, group: tuple[int, int, int]
) -> None:
    first, lanes, rows = group
    device, spec = queries.storage.device, node.spec
    inputs, cache = to.inputs[device], to.store.cache(device, node.layer)
    _, heads, width = queries.shape
    shape = (lanes, rows, heads, width)
    slots = slots_for(to.shape.pages * PAGE, rows, spec.window)
    o = to.program.new(device, "f32", lanes, rows, heads, slots, width)
    stats = to.program.new(device, "f32", lanes, rows, heads, slots, 2)
    where = Lanes(*inputs.lane_rows(first, lanes))
    q, to_y = queries.shaped(*shape), y.shaped(*shape)
    to.step(
        device,
        (q, o, stats, to_y),
        lambda at: attention_decode.attend(
            at(q),
            where,
            cache,
            Scratch(at(o), at(stats)),
            at(to_y),
            scale=spec.scale,
            window=spec.window,
            cap=spec.cap,
        ),
    )


def gate_heads(to: Emitter, gate: Node, attended: Attended) -> Value:
    """Gates lie beside the queries; in place, as nobody else reads what was attended to."""
    part = gate.inputs[0] if isinstance(gate, Flat) else gate
    heads = part.inputs[0] if isinstance(part, Part) else part
    width = attended.inputs[2].shape[2]
    is_beside = isinstance(heads, Heads) and isinstance(part, Part) and part.first == width
    if not is_beside or heads.shape[2] != 2 * width or len(to.users(attended)) > 1:
        refuse("gates of heads that do not lie beside their queries")
    y = to.get(attended, "f16")
    device = y.storage.device
    rows, count = attended.shape[0], heads.shape[1]
    projected = to.get_on(device, heads.inputs[0], "f32").shaped(rows, count, 2 * width)
    shaped = y.shaped(rows, count, width)
    to.step(
        device,
        (projected, y),
        lambda at: (activation.gate_heads(at(projected), at(shaped)),),
    )
    return y
