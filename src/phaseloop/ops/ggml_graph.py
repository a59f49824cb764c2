"""Builds the ggml graph of one batch, for batches of its shape to fill in and run.

ggml names axes the other way round: what the interface calls [T, H, DK] has ne = (DK, H, T).  An
assertion inside ggml ends the process, so nothing here takes a size from anywhere but the checked
model, the checked weights and the `Shape` of the batch.
"""

import ctypes
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .checks import output_width
from .ggml_adapters import AdapterGraph
from .ggml_delta import DeltaGraph
from .ggml_library import array_at
from .ggml_openmp import ggml
from .ggml_regions import Regions
from .ggml_repack import FOURS, Matrix, block_sums, product
from .ggml_shape import TILE_ROWS, Built, Group, MaskInput, Shape
from .interface import (
    FINAL,
    Activation,
    Attention,
    DeltaNet,
    Dimensions,
    Experts,
    Rope,
    Tap,
)

Node: TypeAlias = ggml.ggml_tensor_p
INT32, INT64, UINT16, FLOAT32 = (
    np.dtype(np.int32),
    np.dtype(np.int64),
    np.dtype(np.uint16),
    np.dtype(np.float32),
)
NO_NODE: Node = ctypes.POINTER(ggml.ggml_tensor)()
TILE_WIDTH_STEP = 16  # where values of a head are a multiple of what any CPU computes at once
UNPACKED_BYTES_MAX = 64 << 20  # keys and values of one group
ROPE_ADJACENT, ROPE_HALVES = 0, 2
UNARY: dict[Activation, Callable[[ggml.ggml_context_p, Node], Node]] = {
    "silu": ggml.ggml_silu,
    "gelu": ggml.ggml_gelu,
    "gelu_erf": ggml.ggml_gelu_erf,
    "sigmoid": ggml.ggml_sigmoid,
    "tanh": ggml.ggml_tanh,
}
ROWS_MANY = 3


class GgmlOps:
    """One batch's ops: each call adds nodes, nothing computes."""

    def __init__(
        self,
        context: ggml.ggml_context_p,
        graph: ggml.ggml_cgraph_p,
        weights: Mapping[str, Node],
        repacked: Mapping[str, Matrix],
        planes: list[tuple[Node, Node]],
        state_planes: list[tuple[Node, Node]],
        regions: Regions,
        dimensions: Dimensions,
        shape: Shape,
        adapters: AdapterGraph,
        taps: Sequence[Tap],
    ) -> None:
        self._c = context
        self._taps = taps if shape.shows_hidden else ()
        self._shown: dict[Tap, Node] = {}
        self._adapters = adapters
        self._graph = graph
        self._weights = weights
        self._repacked = repacked
        self._planes = planes
        self._regions = regions
        self._dimensions = dimensions
        self._shape = shape
        self._masks: dict[tuple[int, int | None, bool], Node] = {}
        self._block_sums: dict[int, Node] = {}  # by the address of whose blocks
        # Offsets cost a pass of one or two rows more than their matrix gains.  All generated rows
        # must go one way, and one stream matters more than several.
        self._has_few_rows = shape.row_by_row or (not shape.tile and shape.row_count < ROWS_MANY)
        rows = shape.row_count
        self._tokens = self._input(ggml.GGML_TYPE_I32, rows)
        self._positions = self._input(ggml.GGML_TYPE_I32, rows)
        self._cells = self._input(ggml.GGML_TYPE_I64, rows)
        width = dimensions.given_width
        self._given = self._input(ggml.GGML_TYPE_F32, width, rows) if shape.has_given else None
        all_rows = shape.output_count == rows
        self._outputs = None if all_rows else self._input(ggml.GGML_TYPE_I32, shape.output_count)
        recurrence = dimensions.recurrence
        self._delta = recurrence and DeltaGraph(
            context, graph, weights, state_planes, recurrence, shape.lane_rows
        )

    def embed(self, weight: str, by: Literal["token", "position"] = "token") -> Node:
        rows = self._tokens if by == "token" else self._positions
        found = ggml.ggml_get_rows(self._c, self._weights[weight], rows)
        return self._adapters.lookup(weight, rows, found)

    def first_row(self, weight: str) -> Node:
        matrix = self._weights[weight]
        width = matrix.contents.ne[0]
        return ggml.ggml_cast(
            self._c, ggml.ggml_view_2d(self._c, matrix, width, 1, matrix.contents.nb[1], 0),
            ggml.GGML_TYPE_F32,
        )  # fmt: skip

    def given(self) -> "Node | None":
        return self._given

    def linear(self, weight: str, x: Node, bias: str | None = None) -> Node:
        matrix = self._repacked.get(weight)
        if matrix is None or (matrix.offsets is not None and self._has_few_rows):
            found = ggml.ggml_mul_mat(self._c, self._weights[weight], x)
        else:
            found = self._repacked_product(matrix, x)
        found = self._adapters.linear(weight, x, found)
        return found if bias is None else self.add(found, self._weights[bias])

    def rms_norm(self, x: Node, weight: str, epsilon: float) -> Node:
        return ggml.ggml_mul(
            self._c, ggml.ggml_rms_norm(self._c, x, epsilon), self._weights[weight]
        )

    def layer_norm(self, x: Node, weight: str, bias: str | None, epsilon: float) -> Node:
        normed = ggml.ggml_mul(self._c, ggml.ggml_norm(self._c, x, epsilon), self._weights[weight])
        return normed if bias is None else self.add(normed, self._weights[bias])

    def heads(self, x: Node, count: int) -> Node:
        width, rows = x.contents.ne[0], x.contents.ne[1]
        if not ggml.ggml_is_contiguous(x):
            x = ggml.ggml_cont(self._c, x)
        return ggml.ggml_reshape_3d(self._c, x, width // count, count, rows)

    def rope(self, x: Node, rope: Rope) -> Node:
        return ggml.ggml_rope_ext(
            self._c,
            x,
            self._positions,
            self._weights[rope.factors] if rope.factors else NO_NODE,
            rope.dimensions,
            ROPE_ADJACENT if rope.pairs == "adjacent" else ROPE_HALVES,
            rope.context_original,
            rope.base,
            rope.frequency_scale,
            rope.extrapolation,
            rope.attention_factor,
            rope.beta_fast,
            rope.beta_slow,
        )

    def attend(self, layer: int, q: Node, k: Node, v: Node, spec: Attention) -> Node:
        self.keep(layer, k, v)
        attended: Node | None = None
        row = 0
        for index, group in enumerate(self._shape.groups):
            part = self._attend_group(layer, q, row, index, spec)
            attended = part if attended is None else ggml.ggml_concat(self._c, attended, part, 1)
            row += group.lanes * group.rows
        assert attended is not None, "a batch has lanes"
        return attended

    def keep(self, layer: int, k: Node, v: Node) -> None:
        self._write(layer, 0, k)
        self._write(layer, 1, v)

    def delta_net(self, layer: int, mixed: Node, step: Node, rate: Node, spec: DeltaNet) -> Node:
        assert self._delta is not None, "the model's dimensions tell of its delta nets"
        return self._delta.net(layer, mixed, step, rate, spec)

    def split(self, x: Node, sizes: Sequence[int]) -> tuple[Node, ...]:
        (_, rows, planes, _), (_, row_bytes, plane_bytes, _) = x.contents.ne, x.contents.nb
        starts = [0, *itertools.accumulate(sizes)]
        return tuple(
            ggml.ggml_view_3d(
                self._c, x, size, rows, planes, row_bytes, plane_bytes, start * FLOAT32.itemsize
            )
            for size, start in zip(sizes, starts, strict=False)
        )

    def flat(self, x: Node) -> Node:
        width, heads, rows = x.contents.ne[0], x.contents.ne[1], x.contents.ne[2]
        if not ggml.ggml_is_contiguous(x):
            return ggml.ggml_cont_2d(self._c, x, width * heads, rows)
        return ggml.ggml_reshape_2d(self._c, x, width * heads, rows)

    def join(self, x: Node, y: Node) -> Node:
        return ggml.ggml_concat(self._c, x, y, 0)

    def add(self, x: Node, y: Node) -> Node:
        return ggml.ggml_add(self._c, x, y)

    def scale(self, x: Node, factor: float) -> Node:
        return ggml.ggml_scale(self._c, x, factor)

    def soft_cap(self, x: Node, cap: float) -> Node:
        return self.scale(ggml.ggml_tanh(self._c, self.scale(x, 1.0 / cap)), cap)

    def activated(self, x: Node, activation: Activation) -> Node:
        return UNARY[activation](self._c, x)

    def gated(self, gate: Node, up: Node, activation: Activation) -> Node:
        if activation == "silu":
            return ggml.ggml_swiglu_split(self._c, gate, up)
        if activation == "gelu":
            return ggml.ggml_geglu_split(self._c, gate, up)
        return ggml.ggml_mul(self._c, up, self.activated(gate, activation))

    def experts(self, x: Node, spec: Experts) -> Node:
        c, used = self._c, spec.used
        width, rows = x.contents.ne[0], x.contents.ne[1]
        probability = ggml.ggml_soft_max(c, self.linear(spec.router, x))
        count = probability.contents.ne[0]
        chosen = ggml.ggml_argsort_top_k(c, probability, used)  # [used, T]
        column = ggml.ggml_reshape_3d(c, probability, 1, count, rows)
        share = ggml.ggml_get_rows(c, column, chosen)  # [1, used, T]
        if spec.normalise:
            flat = ggml.ggml_reshape_2d(c, share, used, rows)
            flat = ggml.ggml_div(c, flat, ggml.ggml_sum_rows(c, flat))
            share = ggml.ggml_reshape_3d(c, flat, 1, used, rows)
        x = ggml.ggml_reshape_3d(c, x, width, 1, rows)
        gate = self._of_experts(spec.gate, x, chosen)
        if spec.up is None:
            half = gate.contents.ne[0] // 2
            gate, up = self.split(gate, (half, half))
        else:
            up = self._of_experts(spec.up, x, chosen)
        hidden = self.gated(gate, up, spec.activation)
        parts = ggml.ggml_mul(c, self._of_experts(spec.down, hidden, chosen), share)
        step, stride = parts.contents.nb[1], parts.contents.nb[2]
        total = ggml.ggml_view_2d(c, parts, width, rows, stride, 0)
        for index in range(1, used):
            total = self.add(total, ggml.ggml_view_2d(c, parts, width, rows, stride, index * step))
        return total if used > 1 else ggml.ggml_cont(c, total)

    def tap(self, point: Tap, x: Node) -> None:
        if point in self._taps:
            ggml.ggml_set_output(x)
            ggml.ggml_build_forward_expand(self._graph, x)
            self._shown[point] = x

    def outputs(self, x: Node) -> Node:
        return x if FINAL in self._taps else self._wanted(x)

    def final(self, x: Node) -> Node:
        self.tap(FINAL, x)
        return self._wanted(x) if FINAL in self._taps else x

    # --- after the network has been walked --------------------------------------------------------

    def finish(self, logits: Node) -> None:
        ggml.ggml_set_output(logits)
        # Inputs that the network has no use for are filled in all the same.
        for node in (self._tokens, logits):
            ggml.ggml_build_forward_expand(self._graph, node)

    def built(self, logits: Node) -> Built:
        """To be called once the graph has memory."""
        masks = tuple(
            MaskInput(group, window, causal, self._mask_values(group, node))
            for (group, window, causal), node in self._masks.items()
        )
        outputs = None if self._outputs is None else array_at(self._outputs, INT32)
        return Built(
            graph=self._graph,
            tokens=array_at(self._tokens, INT32),
            positions=array_at(self._positions, INT32),
            cells=array_at(self._cells, INT64),
            outputs=outputs,
            masks=masks,
            states=self._delta and self._delta.inputs(),
            given=None if self._given is None else self._rows_of(self._given),
            hidden=tuple(self._rows_of(self._shown[point]) for point in self._taps),
            logits=array_at(logits, FLOAT32).reshape(-1, output_width(self._dimensions)),
        )

    def _wanted(self, x: Node) -> Node:
        return x if self._outputs is None else ggml.ggml_get_rows(self._c, x, self._outputs)

    def _rows_of(self, node: Node) -> NDArray[np.float32]:
        return array_at(node, FLOAT32).reshape(self._shape.row_count, -1)

    def _mask_values(self, index: int, node: Node) -> NDArray[np.uint16]:
        group = self._shape.groups[index]
        shape = group.lanes, group.padded_rows(self._shape.tile), group.seen
        return array_at(node, UINT16).reshape(shape)

    def _input(self, kind: int, *axes: int) -> Node:
        sizes = (ctypes.c_int64 * len(axes))(*axes)
        node = ggml.ggml_new_tensor(self._c, kind, len(axes), sizes)
        ggml.ggml_set_input(node)
        return node

    def _of_experts(self, weight: str, x: Node, chosen: Node) -> Node:
        found = ggml.ggml_mul_mat_id(self._c, self._weights[weight], x, chosen)
        return self._adapters.experts(weight, x, chosen, found)

    def _repacked_product(self, matrix: Matrix, x: Node) -> Node:
        """As linear, with rows of one kind always computed in the same way."""
        c, width, rows = self._c, x.contents.ne[0], x.contents.ne[1]
        sums = None if matrix.offsets is None else self._sums(x)
        if matrix.stability != "fours" or not (self._shape.tile or self._shape.row_by_row):
            return product(c, matrix, x, sums)
        assert sums is None, "no type with offsets has kernels that take fours"
        if self._shape.row_by_row:
            x = ggml.ggml_reshape_3d(c, x, width, 1, rows)
            found = product(c, matrix, x, None)
            return ggml.ggml_reshape_2d(c, found, found.contents.ne[0], rows)
        if rows % FOURS == 0:
            return product(c, matrix, x, None)
        x = ggml.ggml_pad(c, x, 0, FOURS - rows % FOURS, 0, 0)
        found = product(c, matrix, x, None)
        return ggml.ggml_view_2d(c, found, found.contents.ne[0], rows, found.contents.nb[1], 0)

    def _sums(self, x: Node) -> Node:
        """Sums of x's blocks, which all matrices that x is multiplied with share."""
        address = ctypes.addressof(x.contents)
        known = self._block_sums.get(address)
        if known is None:
            known = self._block_sums[address] = block_sums(self._c, x)
        return known

    def _write(self, layer: int, part: int, rows: Node) -> None:
        width = rows.contents.ne[0] * rows.contents.ne[1]
        flat = ggml.ggml_reshape_2d(self._c, rows, width, self._shape.row_count)
        written = ggml.ggml_set_rows(self._c, self._planes[layer][part], flat, self._cells)
        # Attention reads views of the plane, not this node: only the graph's order makes it wait.
        ggml.ggml_build_forward_expand(self._graph, written)

    def _attend_group(self, layer: int, q: Node, row: int, index: int, spec: Attention) -> Node:
        c, group = self._c, self._shape.groups[index]
        width, heads = q.contents.ne[0], q.contents.ne[1]
        lane_rows = group.padded_rows(self._shape.tile)
        step = q.contents.nb[2]
        queries = ggml.ggml_view_4d(
            c, q, width, heads, group.rows, group.lanes,
            q.contents.nb[1], step, step * group.rows, row * step,
        )  # fmt: skip
        if lane_rows > group.rows:
            queries = ggml.ggml_pad(c, queries, 0, 0, lane_rows - group.rows, 0)
        queries = ggml.ggml_permute(c, queries, 0, 2, 1, 3)
        keys, values = self._seen(layer, 0, group), self._seen(layer, 1, group)
        if self._unpacks(group):
            keys, values = (ggml.ggml_cast(c, part, ggml.GGML_TYPE_F32) for part in (keys, values))
        mask = self._mask(index, spec.window, spec.causal)
        cap = spec.cap or 0.0
        found = ggml.ggml_flash_attn_ext(c, queries, keys, values, mask, spec.scale, 0.0, cap)
        flat_width = found.contents.ne[0] * heads
        flat = ggml.ggml_reshape_2d(c, found, flat_width, lane_rows * group.lanes)
        if lane_rows == group.rows:
            return flat
        assert group.lanes == 1, "only single lanes are filled up to a tile"
        return ggml.ggml_view_2d(c, flat, flat_width, group.rows, flat.contents.nb[1], 0)

    def _seen(self, layer: int, part: int, group: Group) -> Node:
        """[DK, seen, HKV, lanes]: the first positions of the group's regions, in place."""
        plane, heads = self._regions.planes[layer][part], self._dimensions.kv_head_count
        region_bytes = self._regions.capacity * plane.row_bytes
        return ggml.ggml_view_4d(
            self._c, self._planes[layer][part], plane.width, group.seen, heads, group.lanes,
            plane.row_bytes, plane.row_bytes // heads, region_bytes, group.region * region_bytes,
        )  # fmt: skip

    def _unpacks(self, group: Group) -> bool:
        """Whether F16 keys and values are made F32 beforehand, once for all tiles and heads.

        ggml's tiles do that themselves, each for itself; so it changes nothing but the time.
        """
        if self._regions.kind != "F16" or self._shape.row_by_row:
            return False
        if group.padded_rows(self._shape.tile) < TILE_ROWS:
            return False
        shape = self._dimensions
        if shape.value_length % TILE_WIDTH_STEP:
            return False
        width = shape.kv_head_count * (shape.key_length + shape.value_length)
        return 4 * group.lanes * group.seen * width <= UNPACKED_BYTES_MAX

    def _mask(self, index: int, window: int | None, causal: bool) -> Node:
        known = self._masks.get((index, window, causal))
        if known is not None:
            return known
        group = self._shape.groups[index]
        rows = group.padded_rows(self._shape.tile)
        mask = self._input(ggml.GGML_TYPE_F16, group.seen, rows, 1, group.lanes)
        self._masks[index, window, causal] = mask
        return mask
