"""Copies of matrices in the order in which ggml's wider kernels want them.

For some types and CPUs ggml multiplies several rows of a batch by several rows of a matrix at
once, two to three times as fast, if the matrix has been interleaved for it (buffer type
CPU_REPACK).  Of a batch's rows those kernels take four at a time and what is left over singly.  For
some types a row has the same bits either way.  For the others, rows of prompts are filled up to
fours, and generated rows go singly, so that each kind of row always goes the same way.

Q4_1 is none of these types, but it is Q4_0 with another zero: d q + m = d (q - 8) + (m + 8 d).  The
second term is the same for a whole block, so it is times the sum of the row's block, which takes a
thirty-second of the multiply-adds.  Offsets are read as well, though, which a pass of one row does
not get back; ggml_graph says where they are used.

What was copied is seldom read again where its file is mapped, so the system may drop it there.
"""

import ctypes
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from .ggml_library import (
    LOADED,
    Cpu,
    Tensors,
    array_at,
    kind_number,
    new_context,
    new_tensor,
    plain_buffer_type,
)
from .ggml_openmp import ggml
from .interface import BackendError, Weight

Rows = NDArray[np.float32]
# any: a row's bits depend on nothing else.  fours: not while rows come in multiples of four.
Stability = Literal["any", "fours", "none"]
NAME = b"CPU_REPACK"
FOURS = 4
Q4_BLOCK, Q4_1_BYTES = 32, 20
PROBED_OUTPUTS, PROBED_ROWS = 64, 256
COUNTS: dict[Stability, tuple[int, ...]] = {"any": (1, 2, 3, 7, 9, 64), "fours": (4, 8, 20, 64)}
SHIFTS = (0, 1, 2, 3)  # by how much a row moves within its four
ERROR_MAX = 0.01  # root mean square, of what the file's own order gives; that is another rounding

# ggml-python takes these pointers for 32-bit integers; see ggml_library.
find_function = LOADED["ggml_backend_reg_get_proc_address"]
find_function.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
find_function.restype = ctypes.c_void_p
cpu_registry = LOADED["ggml_backend_cpu_reg"]
cpu_registry.argtypes = []
cpu_registry.restype = ctypes.c_void_p
device_of = LOADED["ggml_backend_reg_dev_get"]
device_of.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
device_of.restype = ctypes.c_void_p
type_name = LOADED["ggml_backend_buft_name"]
type_name.argtypes = [ctypes.c_void_p]
type_name.restype = ctypes.c_char_p
size_in = LOADED["ggml_backend_buft_get_alloc_size"]
size_in.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
size_in.restype = ctypes.c_size_t
allocate_in = LOADED["ggml_backend_buft_alloc_buffer"]
allocate_in.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
allocate_in.restype = ctypes.c_void_p
base_of = LOADED["ggml_backend_buffer_get_base"]
base_of.argtypes = [ctypes.c_void_p]
base_of.restype = ctypes.c_void_p
place_in = LOADED["ggml_backend_tensor_alloc"]
place_in.argtypes = [ctypes.c_void_p] * 3
place_in.restype = ctypes.c_int
fill = LOADED["ggml_backend_tensor_set"]
fill.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
fill.restype = None


def repack_type() -> int | None:
    """The buffer type that repacks, or None where ggml has none."""
    registry = cpu_registry()
    address = find_function(registry, b"ggml_backend_dev_get_extra_bufts")
    if address is None:
        return None
    pointers = ctypes.POINTER(ctypes.c_void_p)
    list_types = ctypes.CFUNCTYPE(pointers, ctypes.c_void_p)(address)
    found = list_types(device_of(registry, 0))
    index = 0
    while found and found[index]:
        if type_name(found[index]) == NAME:
            return found[index]
        index += 1
    return None


class Matrix(Struct, frozen=True):
    """`offsets` F32 [blocks of a row, N]: what a row's sum over each of its blocks is times of."""

    node: ggml.ggml_tensor_p
    offsets: "ggml.ggml_tensor_p | None"
    stability: Stability


class Repacked:
    """Repacked copies of those matrices that ggml can repack and whose results can be trusted."""

    def __init__(self, cpu: Cpu, weights: Mapping[str, Weight], *, only_stable: bool) -> None:
        matrices = {name: w for name, w in weights.items() if len(w.shape) == 2}
        # A node and offsets of each, and of one of each kind to try.
        self._context = new_context(4 * len(matrices) * ggml.ggml_tensor_overhead() + 1024)
        self._buffers: list[int] = []
        self._type = repack_type()
        self._cpu = cpu
        self.size_bytes = 0
        self.matrices: dict[str, Matrix] = {}
        kinds: dict[str, Stability | None] = {}
        for name, weight in sorted(matrices.items()):
            if weight.kind not in kinds:
                kinds[weight.kind] = self._try(weight)
            stability = kinds[weight.kind]
            if stability is None or (only_stable and stability == "none"):
                continue
            matrix = self._repack(weight, stability)
            if matrix is not None:
                self.matrices[name] = matrix
                nodes = (matrix.node, matrix.offsets)
                self.size_bytes += sum(ggml.ggml_nbytes(node) for node in nodes if node)

    def close(self) -> None:
        for buffer in self._buffers:
            ggml.ggml_backend_buffer_free(buffer)
        ggml.ggml_free(self._context)

    def _repack(self, weight: Weight, stability: Stability) -> Matrix | None:
        """None if ggml does not repack such a one."""
        if self._type is None:
            return None
        offsets: Rows | None = None
        if weight.kind == "Q4_1":
            weight, offsets = centred(weight)
        node = self._copy(self._type, kind_number(weight), weight.shape, weight.data)
        if node is None or offsets is None:
            return None if node is None else Matrix(node, None, stability)
        kind = int(ggml.GGML_TYPE_F32)
        return Matrix(
            node, self._copy(plain_buffer_type(), kind, offsets.shape, offsets), stability
        )

    def _copy(
        self, buffer_type: int, kind: int, shape: tuple[int, ...], data: NDArray[Any]
    ) -> "ggml.ggml_tensor_p | None":
        node = new_tensor(self._context, kind, shape)
        address = ctypes.cast(node, ctypes.c_void_p)
        # Memory that is not written to costs nothing, so it may be asked for before it is known
        # whether it is needed.
        buffer = allocate_in(buffer_type, size_in(buffer_type, address))
        if buffer is None:
            raise BackendError("no memory for repacked weights; switch repacking off")
        place_in(buffer, address, base_of(buffer))
        if buffer_type == self._type and not node.contents.extra:
            ggml.ggml_backend_buffer_free(buffer)
            return None
        fill(address, data.ctypes.data, 0, ggml.ggml_nbytes(node))
        self._buffers.append(buffer)
        return node

    def _try(self, weight: Weight) -> Stability | None:
        """How stable rows are with this type of weight; None if it is of no use."""
        part = beginning(weight, PROBED_OUTPUTS)
        matrix = self._repack(part, "none")
        if matrix is None:
            return None
        plain = Tensors(1)
        try:
            random = np.random.default_rng(1)
            rows = random.standard_normal((PROBED_ROWS, part.shape[1]), dtype=np.float32)
            whole = compute(self._cpu, matrix, rows)
            wanted = compute(self._cpu, Matrix(plain.add(part), None, "none"), rows)
        finally:
            plain.close()
        error = np.sqrt(np.mean(np.square(whole - wanted)))
        if not error <= ERROR_MAX * np.sqrt(np.mean(np.square(wanted))):  # NaN is no use either
            return None
        return stability_of(lambda some: compute(self._cpu, matrix, some), rows, whole)


def beginning(weight: Weight, outputs: int) -> Weight:
    """The matrix's first rows."""
    outputs = min(outputs, weight.shape[0])
    size = weight.data.nbytes // weight.shape[0] * outputs
    return Weight(weight.name, weight.kind, (outputs, weight.shape[1]), weight.data[:size])


def centred(weight: Weight) -> tuple[Weight, Rows]:
    """Q4_1 as Q4_0, which ggml repacks, and offsets: d q + m = d (q - 8) + (m + 8 d)."""
    outputs, width = weight.shape
    blocks = weight.data.reshape(outputs, width // Q4_BLOCK, Q4_1_BYTES)
    scales, minima = (
        np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0].astype(np.float32)
        for at in (0, 2)
    )
    packed = np.concatenate((blocks[..., :2], blocks[..., 4:]), axis=-1)
    offsets = np.ascontiguousarray((minima + 8 * scales).T)
    return Weight(weight.name, "Q4_0", weight.shape, packed.reshape(-1)), offsets


def block_sums(context: ggml.ggml_context_p, x: ggml.ggml_tensor_p) -> ggml.ggml_tensor_p:
    """[T, D] -> [D / 32, T]."""
    blocks, rows = x.contents.ne[0] // Q4_BLOCK, x.contents.ne[1]
    sums = ggml.ggml_sum_rows(context, ggml.ggml_reshape_3d(context, x, Q4_BLOCK, blocks, rows))
    return ggml.ggml_transpose(context, ggml.ggml_reshape_2d(context, sums, blocks, rows))


def product(
    context: ggml.ggml_context_p,
    matrix: Matrix,
    x: ggml.ggml_tensor_p,
    sums: "ggml.ggml_tensor_p | None",
) -> ggml.ggml_tensor_p:
    """x [T, D] times the matrix [N, D] -> [T, N]; `sums` are x's, where there are offsets."""
    found = ggml.ggml_mul_mat(context, matrix.node, x)
    if matrix.offsets is None:
        return found
    assert sums is not None, "offsets are times of sums"
    return ggml.ggml_add(context, found, ggml.ggml_out_prod(context, matrix.offsets, sums))


def stability_of(kernel: Callable[[Rows], Rows], rows: Rows, whole: Rows) -> Stability:
    for stability, counts in COUNTS.items():
        parts = [(shift, shift + count) for count in counts for shift in SHIFTS]
        if all(
            kernel(rows[start:end]).tobytes() == whole[start:end].tobytes() for start, end in parts
        ):
            return stability
    return "none"


def compute(cpu: Cpu, matrix: Matrix, rows: Rows) -> Rows:
    """rows [T, D] times the matrix [N, D] -> [T, N], at once."""
    context = new_context(16 * ggml.ggml_tensor_overhead() + ggml.ggml_graph_overhead())
    x = new_tensor(context, ggml.GGML_TYPE_F32, rows.shape)
    ggml.ggml_set_input(x)
    sums = None if matrix.offsets is None else block_sums(context, x)
    found = product(context, matrix, x, sums)
    ggml.ggml_set_output(found)
    graph = ggml.ggml_new_graph(context)
    ggml.ggml_build_forward_expand(graph, found)
    allocator = cpu.allocate(graph)
    try:
        array_at(x, np.dtype(np.float32))[:] = rows.reshape(-1)
        cpu.compute(graph, row_by_row=False)
        return array_at(found, np.dtype(np.float32)).reshape(len(rows), -1).copy()
    finally:
        ggml.ggml_gallocr_free(allocator)
        ggml.ggml_free(context)
