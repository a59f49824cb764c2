"""Hands on ggml: the CPU that computes graphs, and tensors over memory that others own."""

import ctypes
import logging
from typing import TypeVar

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from .ggml_openmp import ggml
from .interface import Aborted, BackendError, Weight

Scalar = TypeVar("Scalar", bound=np.generic)
STATUS_OK, STATUS_ABORTED = 0, 1
THREADS_MAX = 512
ALIGNMENT = 32  # bytes; what ggml asserts of a buffer's start
ROW_COUNTS = (1, 7, 9, 64)  # that must compute what the same rows of ROW_COUNT_ALL compute
ROW_COUNT_ALL = 512
PROBED_OUTPUTS = 96

# ggml-python declares the results of the first two as Python types, which ctypes takes for 32-bit
# integers: the pointers would lose their upper halves.  It has loaded them for all to see.
LOADED = ctypes.CDLL(None)
buffer_from_pointer = LOADED["ggml_backend_cpu_buffer_from_ptr"]
buffer_from_pointer.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
buffer_from_pointer.restype = ctypes.c_void_p
plain_buffer_type = LOADED["ggml_backend_cpu_buffer_type"]
plain_buffer_type.argtypes = []
plain_buffer_type.restype = ctypes.c_void_p
# This one takes a Python function there; here it gets one of libc.
set_abort_callback = LOADED["ggml_backend_cpu_set_abort_callback"]
set_abort_callback.argtypes = [ctypes.c_void_p] * 3
set_abort_callback.restype = None
log = logging.getLogger(__name__)
LOG_LEVELS = {3: logging.WARNING, 4: logging.ERROR}  # what ggml tells besides is of no use here


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def on_log(level: int, text: bytes, _data: int | None) -> None:
    if level in LOG_LEVELS:
        log.log(LOG_LEVELS[level], "%s", text.decode(errors="replace").strip())


LOADED["ggml_log_set"](on_log, None)


class Cpu:
    """One ggml CPU backend and its threads.  One caller at a time, `abort` excepted."""

    def __init__(self, threads: int) -> None:
        if not 1 <= threads <= THREADS_MAX:
            raise BackendError(f"{threads} threads; 1 to {THREADS_MAX} are possible")
        handle = ggml.ggml_backend_cpu_init()
        if handle is None:
            raise BackendError("ggml found no CPU backend; reinstall ggml-python")
        self._handle = handle
        self.threads = threads
        ggml.ggml_backend_cpu_set_n_threads(handle, threads)
        # ggml asks `bool aborted(void *)` at every node.  A Python function would take the
        # interpreter's lock each time; libc's strlen answers the same question of this text: 0
        # while it is empty, 1 once abort() has written its first byte.
        self._flag = np.zeros(2, np.uint8)
        set_abort_callback(handle, LOADED.strlen, self._flag.ctypes.data)

    def compute(self, graph: ggml.ggml_cgraph_p, *, row_by_row: bool) -> None:
        """`row_by_row`: no path of ggml's attention but the one that treats each row alone."""
        ggml.ggml_backend_cpu_set_use_ref(self._handle, row_by_row)
        status = ggml.ggml_backend_graph_compute(self._handle, graph)
        if status == STATUS_ABORTED:
            raise Aborted
        if status != STATUS_OK:
            raise BackendError(f"ggml failed with status {status}; is memory short?")

    def abort(self) -> None:
        self._flag[0] = 1

    def resume(self) -> None:
        self._flag[0] = 0

    def allocate(self, graph: ggml.ggml_cgraph_p) -> int:
        """Memory for a graph's nodes; free it with ggml_gallocr_free."""
        allocator = ggml.ggml_gallocr_new(plain_buffer_type())
        if allocator is not None:
            if ggml.ggml_gallocr_alloc_graph(allocator, graph):
                return allocator
            ggml.ggml_gallocr_free(allocator)
        raise BackendError("no memory for a batch's intermediate results; lower the ubatch")

    def close(self) -> None:
        ggml.ggml_backend_free(self._handle)


class Tensors:
    """ggml tensors over memory that outlives them."""

    def __init__(self, count: int) -> None:
        self._context = new_context(count * ggml.ggml_tensor_overhead())
        self._buffers: list[int] = []
        self._memory: list[NDArray[np.uint8]] = []  # kept alive

    def add(self, weight: Weight) -> ggml.ggml_tensor_p:
        return self.place(kind_number(weight), weight.shape, weight.data, weight.name)

    def place(
        self, kind: int, shape: tuple[int, ...], memory: NDArray[np.uint8], name: str
    ) -> ggml.ggml_tensor_p:
        """A tensor of row-major `shape` whose data begin where `memory` begins."""
        tensor = new_tensor(self._context, kind, shape)
        size, address = ggml.ggml_nbytes(tensor), memory.ctypes.data
        if size > memory.nbytes or address % ALIGNMENT:
            raise BackendError(
                f"tensor {name}: {memory.nbytes} bytes at {address:#x}, "
                f"ggml needs {size} aligned to {ALIGNMENT}"
            )
        buffer = buffer_from_pointer(address, memory.nbytes)
        ggml.ggml_backend_tensor_alloc(buffer, tensor, ctypes.c_void_p(address))
        self._buffers.append(buffer)
        self._memory.append(memory)
        return tensor

    def close(self) -> None:
        for buffer in self._buffers:
            ggml.ggml_backend_buffer_free(buffer)
        ggml.ggml_free(self._context)
        self._memory.clear()


def new_context(size_bytes: int) -> ggml.ggml_context_p:
    """A context for descriptions of tensors; their data lie elsewhere."""
    context = ggml.ggml_init(ggml.ggml_init_params(size_bytes, None, True))
    if context is None:
        raise BackendError(f"no memory for {size_bytes} bytes of ggml tensors")
    return context


def kind_number(weight: Weight) -> int:
    """ggml's number for the weight's type."""
    return int(GGMLQuantizationType[weight.kind])


def new_tensor(
    context: ggml.ggml_context_p, kind: int, shape: tuple[int, ...]
) -> ggml.ggml_tensor_p:
    """The description of a tensor of row-major `shape`."""
    axes = (ctypes.c_int64 * len(shape))(*reversed(shape))
    return ggml.ggml_new_tensor(context, kind, len(shape), axes)


def rows_are_stable(cpu: Cpu, weight: ggml.ggml_tensor_p) -> bool:
    """Whether rows of a matmul with this weight are the same bits whatever rows are beside them."""
    width = weight.contents.ne[0]
    random = np.random.default_rng(1)
    rows = random.standard_normal((ROW_COUNT_ALL, width), dtype=np.float32)
    whole = matmul(cpu, weight, rows)
    return all(
        matmul(cpu, weight, rows[:count]).tobytes() == whole[:count].tobytes()
        for count in ROW_COUNTS
    )


def matmul(cpu: Cpu, weight: ggml.ggml_tensor_p, rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """rows [T, D] times the first outputs of weight [N, D] -> [T, min(N, 96)]."""
    count, width = rows.shape
    outputs = min(weight.contents.ne[1], PROBED_OUTPUTS)
    context = new_context(16 * ggml.ggml_tensor_overhead() + ggml.ggml_graph_overhead())
    stride = weight.contents.nb[1]
    part = ggml.ggml_view_2d(context, weight, width, outputs, stride, 0)
    x = ggml.ggml_new_tensor_2d(context, ggml.GGML_TYPE_F32, width, count)
    ggml.ggml_set_input(x)
    product = ggml.ggml_mul_mat(context, part, x)
    ggml.ggml_set_output(product)
    graph = ggml.ggml_new_graph(context)
    ggml.ggml_build_forward_expand(graph, product)
    allocator = cpu.allocate(graph)
    try:
        array_at(x, np.dtype(np.float32))[:] = rows.reshape(-1)
        cpu.compute(graph, row_by_row=False)
        return array_at(product, np.dtype(np.float32)).reshape(count, outputs).copy()
    finally:
        ggml.ggml_gallocr_free(allocator)
        ggml.ggml_free(context)


def array_at(node: ggml.ggml_tensor_p, dtype: "np.dtype[Scalar]") -> NDArray[Scalar]:
    """The node's memory, flat.  Valid as long as its buffer."""
    size = ggml.ggml_nbytes(node)
    address = ggml.ggml_get_data(node)
    assert address is not None, "the node has no memory yet"
    space = (ctypes.c_uint8 * size).from_address(address)
    return np.ctypeslib.as_array(space).view(dtype)
