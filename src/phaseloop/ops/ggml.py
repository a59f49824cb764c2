"""The CPU backend: ggml computes, over weights where the file's mapping has them.

Three ways to attend.
`tiled`   prompts always in tiles of 64 query rows, short ones filled up; generated tokens always
          row by row.  The bits of a row do not depend on how its prompt was cut, on its
          neighbours or on threads.  As fast as ggml is.
`rows`    every row by itself: also the same bits for a generated token and a prompt's.  Slow on
          long prompts.  A Q8_0 cache knows no other.
`fast`    as ggml decides by the shape of a batch: nothing is promised.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from .adapters import Adapter, list_of
from .checks import check_spans, output_rows, output_width
from .delta_states import MARKS_MAX, NO_SHIFT, Leg, States
from .gather import Gathered
from .ggml_adapters import AdapterGraph, place, unstable_kinds
from .ggml_graph import GgmlOps
from .ggml_library import Cpu, Tensors, new_context, rows_are_stable
from .ggml_openmp import ggml
from .ggml_regions import POSITION_STEP, CacheKind, Regions
from .ggml_repack import Repacked
from .ggml_shape import TILE_ROWS, Built, Group, MaskInput, Shape, node_count_max
from .interface import (
    BackendError,
    Dimensions,
    Network,
    Region,
    Rows,
    Snapshot,
    Span,
    Tap,
    Weight,
)
from .passes import Pass, cut
from .reference import unpack

AttentionPath = Literal["tiled", "rows", "fast"]
UBATCH_ROWS = 512
UBATCH_ROWS_MIN = 32
MASK_BYTES_MAX = 256 << 20
GRAPHS_KEPT = 16
KEPT_ROWS_MAX = 64  # larger graphs are prompts', which seldom come twice
F16_NEVER = np.uint16(0xFC00)  # minus infinity
CACHE_TYPES: dict[CacheKind, int] = {"F16": ggml.GGML_TYPE_F16, "Q8_0": ggml.GGML_TYPE_Q8_0}


class Graph:
    """Owns a graph's nodes and memory."""

    def __init__(self, built: Built, context: ggml.ggml_context_p, allocator: int) -> None:
        self.built = built
        self._context = context
        self._allocator = allocator

    def free(self) -> None:
        ggml.ggml_gallocr_free(self._allocator)
        ggml.ggml_free(self._context)


class GgmlBackend:
    def __init__(
        self,
        network: Network,
        weights: Mapping[str, Weight],
        dimensions: Dimensions,
        *,
        region_count: int,
        capacity: int,
        threads: int,
        cache: CacheKind = "F16",
        attention: AttentionPath = "tiled",
        ubatch: int = UBATCH_ROWS,
        repack: bool = True,
        marks_max: int = MARKS_MAX,
        adapters: Sequence[Adapter] = (),
        taps: Sequence[Tap] = (),
    ) -> None:
        """`repack`: copy matrices for ggml's wider kernels where it has some and bits allow it.

        `marks_max`: how many marked recurrent states a region keeps.  `adapters`: what a span's
        list counts, from 0.  `taps`: where the hidden rows are seen that forward_hidden returns.
        """
        self._network = network
        self._taps = tuple(taps)
        self._dimensions = dimensions
        self._capacity = capacity
        self._attention: AttentionPath = attention
        if cache == "Q8_0" and attention == "tiled":
            self._attention = "rows"
        self._regions = Regions(dimensions, cache, count=region_count, capacity=capacity)
        self._cpu = Cpu(threads)
        shape = dimensions.recurrence
        self._states = shape and States(
            shape, np.float32, region_count=region_count, marks_max=marks_max
        )
        layers = len(dimensions.ropes) + (shape.layer_count if shape else 0)
        factors = 2 * sum(len(adapter.parts()) for adapter in adapters)
        self._tensors = Tensors(len(weights) + 2 * layers + factors)
        self._weights = {name: self._tensors.add(weight) for name, weight in weights.items()}
        self._adapters = [place(self._tensors, adapter) for adapter in adapters]
        self._repacked = Repacked(
            self._cpu, weights if repack else {}, only_stable=attention != "fast"
        )
        self._planes = self._placed_planes()
        self._state_planes = self._placed_states()
        names = {rope.factors for rope in dimensions.ropes if rope.factors is not None}
        self._factors = {name: unpack(weights[name]) for name in names}
        self._expert_count = max(
            (w.shape[0] for w in weights.values() if len(w.shape) > 2), default=0
        )
        # Two masks, of all positions and of a window, must fit beside each other.
        fitting = MASK_BYTES_MAX // (4 * self._regions.capacity)
        self._rows_max = min(ubatch, max(UBATCH_ROWS_MIN, fitting))
        self._graphs: OrderedDict[Shape, Graph] = OrderedDict()
        unstable = self._unstable_kinds(weights) | unstable_kinds(
            self._cpu, adapters, self._adapters
        )
        self.unstable_kinds = tuple(sorted(unstable))

    @property
    def name(self) -> str:
        version = ggml.ggml_version().decode()
        repacked = "-repacked" if self._repacked.matrices else ""
        return f"ggml-{version}-{self._attention}-{self._regions.kind.lower()}{repacked}"

    @property
    def generated_like_prompt(self) -> bool:
        """Whether a generated token has the bits that it would have in a prompt."""
        return self._attention == "rows"

    @property
    def position_bytes(self) -> int:
        return self._regions.position_bytes

    @property
    def repacked_bytes(self) -> int:
        """What repacked copies take beside the weights."""
        return self._repacked.size_bytes

    @property
    def state_bytes(self) -> int:
        return 0 if self._states is None else self._states.state_bytes

    def positions(self, region: Region) -> tuple[int, ...] | None:
        return None if self._states is None else self._states.positions(region)

    def forward(self, spans: Sequence[Span]) -> Rows:
        return self._forward(spans, shows_hidden=False).logits

    def forward_hidden(self, spans: Sequence[Span]) -> tuple[Rows, Rows]:
        found = self._forward(spans, shows_hidden=True)
        hidden = found.hidden
        return found.logits, np.empty((0, 0), np.float32) if hidden is None else hidden

    def _forward(self, spans: Sequence[Span], *, shows_hidden: bool) -> Gathered:
        adapter_count = len(self._adapters)
        check_spans(spans, self._dimensions, self._regions.count, self._capacity, adapter_count)
        dimensions = self._dimensions
        found = Gathered(spans, output_width(dimensions))
        legs = {} if self._states is None else self._states.begin(spans)
        apart, whole = self._attention == "tiled", dimensions.whole_lanes
        for one in cut(spans, self._rows_max, apart=apart, whole=whole):
            self._run(one, found, legs, shows_hidden)
            if self._states is not None:
                self._states.passed(legs, one.pieces)
        if self._states is not None:
            self._states.commit(legs)
        return found

    def abort(self) -> None:
        self._cpu.abort()

    def resume(self) -> None:
        self._cpu.resume()

    def truncate(self, region: Region, length: int) -> None:
        self._regions.truncate(region, length)
        if self._states is not None:
            self._states.truncate(region, length)

    def copy(self, source: Region, target: Region, length: int) -> None:
        self._regions.copy(source, target, length)
        if self._states is not None:
            self._states.restore(target, self._states.save(source, length), length)

    def save(self, region: Region, length: int) -> Snapshot:
        snapshot = self._regions.save(region, length)
        if self._states is None:
            return snapshot
        return replace(snapshot, states=self._states.save(region, length))

    def restore(self, region: Region, snapshot: Snapshot) -> None:
        self._regions.restore(region, snapshot)
        if self._states is not None:
            self._states.restore(region, snapshot.states or (), snapshot.length)

    def shift(self, region: Region, start: int, count: int, length: int) -> None:
        if self._states is not None:
            raise BackendError(NO_SHIFT)
        self._regions.shift(region, start, count, length, self._factors)

    def close(self) -> None:
        for graph in self._graphs.values():
            graph.free()
        self._graphs.clear()
        self._tensors.close()
        self._repacked.close()
        self._cpu.close()
        self._regions.close()

    # --- one pass ---------------------------------------------------------------------------------

    def _run(
        self, one: Pass, found: Gathered, legs: Mapping[Region, Leg], shows_hidden: bool
    ) -> None:
        pieces = one.pieces
        shape = self._shape_of(pieces, shows_hidden)
        graph = self._graph_for(shape)
        try:
            fill_inputs(graph.built, shape, pieces, self._regions.capacity)
            if graph.built.states is not None:
                graph.built.states.fill(
                    [(legs[piece.region].read, legs[piece.region].write) for piece in pieces]
                )
            self._cpu.compute(graph.built.graph, row_by_row=shape.row_by_row)
            found.take(one, graph.built.logits, graph.built.hidden)
        finally:
            if shape not in self._graphs:
                graph.free()

    def _shape_of(self, pieces: Sequence[Span], shows_hidden: bool) -> Shape:
        groups: list[Group] = []
        # A graph for generated tokens serves again until they see more.  One for prompts seldom
        # does, and ggml looks at every tile of their masks.
        is_tiled = self._attention == "tiled" and not pieces[0].generated
        step = POSITION_STEP if all(len(piece.tokens) == 1 for piece in pieces) else TILE_ROWS
        for piece in pieces:
            rows = len(piece.tokens)
            seen = -(-(piece.start + rows) // step) * step
            last = groups[-1] if groups else None
            if (
                last is not None
                and not is_tiled
                and rows == last.rows == 1
                and seen == last.seen
                and piece.region == last.region + last.lanes
            ):
                groups[-1] = Group(last.region, last.lanes + 1, rows, seen)
            else:
                groups.append(Group(piece.region, 1, rows, seen))
        return Shape(
            groups=tuple(groups),
            row_count=sum(len(piece.tokens) for piece in pieces),
            output_count=len(output_rows(pieces)),
            tile=is_tiled,
            row_by_row=self._attention != "fast" and not is_tiled,
            adapters=list_of(pieces),
            has_given=pieces[0].given is not None,
            shows_hidden=shows_hidden,
        )

    def _graph_for(self, shape: Shape) -> Graph:
        graph = self._graphs.get(shape)
        if graph is not None:
            self._graphs.move_to_end(shape)
            return graph
        graph = self._build(shape)
        if shape.row_count <= KEPT_ROWS_MAX:
            self._graphs[shape] = graph
            if len(self._graphs) > GRAPHS_KEPT:
                self._graphs.popitem(last=False)[1].free()
        return graph

    def _build(self, shape: Shape) -> Graph:
        nodes = node_count_max(self._dimensions, shape, self._expert_count)
        nodes += sum(self._adapters[adapter].node_count for adapter, _ in shape.adapters)
        space = nodes * ggml.ggml_tensor_overhead() + ggml.ggml_graph_overhead_custom(nodes, False)
        context = new_context(space)
        graph = ggml.ggml_new_graph_custom(context, nodes, False)
        ops = GgmlOps(
            context,
            graph,
            self._weights,
            self._repacked.matrices,
            self._planes,
            self._state_planes,
            self._regions,
            self._dimensions,
            shape,
            AdapterGraph(context, self._adapters, shape.adapters),
            self._taps,
        )
        logits = self._network(ops)
        ops.finish(logits)
        allocator = self._cpu.allocate(graph)
        return Graph(ops.built(logits), context, allocator)

    # --- at load ----------------------------------------------------------------------------------

    def _placed_planes(self) -> list[tuple[ggml.ggml_tensor_p, ggml.ggml_tensor_p]]:
        return [
            (self._plane(keys.offset, keys.width), self._plane(values.offset, values.width))
            for keys, values in self._regions.planes
        ]

    def _plane(self, offset: int, width: int) -> ggml.ggml_tensor_p:
        positions = self._regions.capacity * self._regions.count
        shape = (positions, width * self._dimensions.kv_head_count)
        memory = self._regions.memory[offset:]
        kind = CACHE_TYPES[self._regions.kind]
        return self._tensors.place(kind, shape, memory, "KV regions")

    def _placed_states(self) -> list[tuple[ggml.ggml_tensor_p, ggml.ggml_tensor_p]]:
        if self._states is None:
            return []
        return [
            (self._state_plane(matrices, 2), self._state_plane(histories, 1))
            for matrices, histories in zip(
                self._states.matrices, self._states.histories, strict=True
            )
        ]

    def _state_plane(self, plane: NDArray[np.float32], leading: int) -> ggml.ggml_tensor_p:
        """Its first `leading` axes are rows, the others a row's values."""
        rows = plane.reshape(int(np.prod(plane.shape[:leading])), -1)
        memory = rows.reshape(-1).view(np.uint8)
        return self._tensors.place(ggml.GGML_TYPE_F32, rows.shape, memory, "recurrent states")

    def _unstable_kinds(self, weights: Mapping[str, Weight]) -> set[str]:
        """Types of matrices whose rows depend on their neighbours: with them, P3 does not hold."""
        samples = {w.kind: name for name, w in sorted(weights.items()) if len(w.shape) == 2}
        return {
            kind
            for kind, name in samples.items()
            if not rows_are_stable(self._cpu, self._weights[name])
        }


def fill_inputs(built: Built, shape: Shape, pieces: Sequence[Span], capacity: int) -> None:
    row = 0
    for piece in pieces:
        count = len(piece.tokens)
        rows = slice(row, row + count)
        built.tokens[rows] = piece.tokens
        built.positions[rows] = range(piece.start, piece.start + count)
        first = piece.region * capacity + piece.start
        built.cells[rows] = range(first, first + count)
        if built.given is not None:
            built.given[rows] = piece.given
        row += count
    if built.outputs is not None:
        built.outputs[:] = output_rows(pieces)
    first_lanes = [0]
    for group in shape.groups:
        first_lanes.append(first_lanes[-1] + group.lanes)
    for mask in built.masks:
        lanes = pieces[first_lanes[mask.group] : first_lanes[mask.group + 1]]
        for lane, piece in enumerate(lanes):
            fill_mask(mask, lane, piece)


def fill_mask(mask: MaskInput, lane: int, piece: Span) -> None:
    """Zero where a row may look, minus infinity elsewhere; rows that fill up a tile see nothing."""
    values = mask.values[lane]
    count = len(piece.tokens)
    if count == 1:
        first = 0 if mask.window is None else max(0, piece.start + 1 - mask.window)
        values[:] = F16_NEVER
        values[0, first : piece.start + 1] = 0
        return
    position: NDArray[np.int64] = np.arange(values.shape[1], dtype=np.int64)
    own = np.arange(piece.start, piece.start + count, dtype=np.int64)[:, None]
    last = own if mask.causal else np.full_like(own, own[-1])
    sees: NDArray[np.bool_] = position <= last
    if mask.window is not None:
        sees &= position > own - mask.window
    values[:count] = np.where(sees, np.uint16(0), F16_NEVER)
    values[count:] = F16_NEVER
