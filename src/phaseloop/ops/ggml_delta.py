"""Gated delta nets as ggml nodes.

ggml's fused op goes through a sequence token by token, head by head, with nothing shared between
heads or sequences: so the bits of a state do not depend on where its prompt was cut, on its company
or on threads.  States are gathered from cells and scattered to cells by indices that are inputs, so
that one graph serves whatever cells its lanes have.
"""

import ctypes
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from .ggml_library import array_at
from .ggml_openmp import ggml
from .interface import DeltaNet, Recurrence

Node: TypeAlias = ggml.ggml_tensor_p
F32_BYTES, I32_BYTES, I64_BYTES = 4, 4, 8
NODES_PER_RUN = 40


class Run(Struct, frozen=True):
    """Consecutive lanes of a batch that have as many rows each: one op takes them all."""

    lane: int  # the first
    lanes: int
    row: int  # the first lane's first
    rows: int  # of one lane


class StateInputs(Struct, frozen=True):
    """Where the lanes' states come from and go to: cells, and rows of the planes of heads."""

    read: NDArray[np.int32]  # [lanes]
    read_heads: NDArray[np.int32]  # [lanes * HV]
    write: NDArray[np.int64]
    write_heads: NDArray[np.int64]

    def fill(self, cells: Sequence[tuple[int, int]]) -> None:
        """`cells` has for each lane the cell to read and the one to write."""
        read, write = (np.array(side, np.int64) for side in zip(*cells, strict=True))
        head = np.arange(len(self.read_heads) // len(self.read))
        self.read[:], self.write[:] = read, write
        self.read_heads[:] = (read[:, None] * len(head) + head).reshape(-1)
        self.write_heads[:] = (write[:, None] * len(head) + head).reshape(-1)


class DeltaGraph:
    """The delta nets of one batch.

    `planes` has for each layer the matrices [cells * HV, S * S] and the rows of its convolution
    [cells, C * (K - 1)]; `lane_rows` the number of rows of each lane.
    """

    def __init__(
        self,
        context: ggml.ggml_context_p,
        graph: ggml.ggml_cgraph_p,
        weights: Mapping[str, Node],
        planes: Sequence[tuple[Node, Node]],
        shape: Recurrence,
        lane_rows: Sequence[int],
    ) -> None:
        self._c = context
        self._graph = graph
        self._weights = weights
        self._planes = planes
        self._shape = shape
        self._runs = runs_of(lane_rows)
        lanes = len(lane_rows)
        self._read = self._index(ggml.GGML_TYPE_I32, lanes)
        self._read_heads = self._index(ggml.GGML_TYPE_I32, lanes * shape.value_heads)
        self._write = self._index(ggml.GGML_TYPE_I64, lanes)
        self._write_heads = self._index(ggml.GGML_TYPE_I64, lanes * shape.value_heads)

    def net(self, layer: int, mixed: Node, step: Node, rate: Node, spec: DeltaNet) -> Node:
        """As Ops.delta_net."""
        c = self._c
        decay = ggml.ggml_mul(c, ggml.ggml_softplus(c, step), self._weights[spec.decay])
        rate = ggml.ggml_sigmoid(c, rate)
        found: Node | None = None
        for run in self._runs:
            convolved = self._convolve(layer, mixed, run, self._weights[spec.convolution])
            part = self._recur(layer, convolved, decay, rate, run, spec.epsilon)
            found = part if found is None else ggml.ggml_concat(c, found, part, 2)
        assert found is not None, "a batch has lanes"
        return found

    def inputs(self) -> StateInputs:
        """To be called once the graph has memory."""
        int32, int64 = np.dtype(np.int32), np.dtype(np.int64)
        return StateInputs(
            read=array_at(self._read, int32),
            read_heads=array_at(self._read_heads, int32),
            write=array_at(self._write, int64),
            write_heads=array_at(self._write_heads, int64),
        )

    # --- one run ----------------------------------------------------------------------------------

    def _convolve(self, layer: int, mixed: Node, run: Run, kernel: Node) -> Node:
        """silu(convolution) of the run's rows [lanes][rows][C]; leaves the last K - 1 behind."""
        c, shape, plane = self._c, self._shape, self._planes[layer][1]
        channels, kept = shape.channels, shape.kernel - 1
        step = mixed.contents.nb[1]
        rows = ggml.ggml_view_3d(
            c, mixed, channels, run.rows, run.lanes, step, step * run.rows, step * run.row
        )
        before = ggml.ggml_get_rows(c, plane, self._part(self._read, run.lane, run.lanes))
        before = ggml.ggml_reshape_3d(c, before, kept, channels, run.lanes)
        joined = ggml.ggml_concat(c, before, ggml.ggml_permute(c, rows, 1, 0, 2, 3), 0)
        last = ggml.ggml_view_3d(
            c, joined, kept, channels, run.lanes,
            joined.contents.nb[1], joined.contents.nb[2], run.rows * F32_BYTES,
        )  # fmt: skip
        last = ggml.ggml_cont_2d(c, last, kept * channels, run.lanes)
        self._keep(plane, last, self._part(self._write, run.lane, run.lanes))
        return ggml.ggml_silu(c, ggml.ggml_ssm_conv(c, joined, kernel))

    def _recur(
        self, layer: int, convolved: Node, decay: Node, rate: Node, run: Run, epsilon: float
    ) -> Node:
        """[lanes * rows][HV][S]: the recurrence over the run's rows; leaves the states behind."""
        c, shape, plane = self._c, self._shape, self._planes[layer][0]
        width, heads = shape.width, shape.value_heads
        q, k, v = (
            self._heads(convolved, first, count)
            for first, count in (
                (0, shape.key_heads),
                (shape.key_heads, shape.key_heads),
                (2 * shape.key_heads, heads),
            )
        )
        first, count = run.lane * heads, run.lanes * heads
        state = ggml.ggml_get_rows(c, plane, self._part(self._read_heads, first, count))
        state = ggml.ggml_reshape_4d(c, state, width, width, heads, run.lanes)
        found = ggml.ggml_gated_delta_net(
            c, self._unit(q, epsilon), self._unit(k, epsilon), v,
            self._scalars(decay, run), self._scalars(rate, run), state, 1,
        )  # fmt: skip
        row_bytes, rows = width * heads * F32_BYTES, run.lanes * run.rows
        after = ggml.ggml_view_2d(
            c, found, width * width, count, width * width * F32_BYTES, rows * row_bytes
        )
        self._keep(plane, after, self._part(self._write_heads, first, count))
        return ggml.ggml_view_3d(c, found, width, heads, rows, width * F32_BYTES, row_bytes, 0)

    def _heads(self, convolved: Node, first: int, count: int) -> Node:
        """[lanes][rows][count][S] of [lanes][rows][C], in place."""
        width, ne, nb = self._shape.width, convolved.contents.ne, convolved.contents.nb
        return ggml.ggml_view_4d(
            self._c, convolved, width, count, ne[1], ne[2],
            width * F32_BYTES, nb[1], nb[2], first * width * F32_BYTES,
        )  # fmt: skip

    def _unit(self, x: Node, epsilon: float) -> Node:
        """x / sqrt(sum(x^2) + epsilon); ggml's own norm takes the larger of the two instead."""
        width = self._shape.width
        normed = ggml.ggml_rms_norm(self._c, x, epsilon / width)
        return ggml.ggml_scale(self._c, normed, width**-0.5)

    def _scalars(self, x: Node, run: Run) -> Node:
        """[lanes][rows][HV][1] of x [T, HV], in place."""
        heads = self._shape.value_heads
        row_bytes = heads * F32_BYTES
        return ggml.ggml_view_4d(
            self._c, x, 1, heads, run.rows, run.lanes,
            F32_BYTES, row_bytes, row_bytes * run.rows, row_bytes * run.row,
        )  # fmt: skip

    def _keep(self, plane: Node, rows: Node, places: Node) -> None:
        written = ggml.ggml_set_rows(self._c, plane, rows, places)
        ggml.ggml_build_forward_expand(self._graph, written)

    def _part(self, index: Node, first: int, count: int) -> Node:
        step = I64_BYTES if index.contents.type == ggml.GGML_TYPE_I64 else I32_BYTES
        return ggml.ggml_view_1d(self._c, index, count, first * step)

    def _index(self, kind: int, count: int) -> Node:
        node = ggml.ggml_new_tensor(self._c, kind, 1, (ctypes.c_int64 * 1)(count))
        ggml.ggml_set_input(node)
        return node


def runs_of(lane_rows: Sequence[int]) -> list[Run]:
    runs: list[Run] = []
    row = 0
    for lane, rows in enumerate(lane_rows):
        last = runs[-1] if runs else None
        if last is not None and last.rows == rows:
            runs[-1] = Run(last.lane, last.lanes + 1, last.row, rows)
        else:
            runs.append(Run(lane, 1, row, rows))
        row += rows
    return runs
