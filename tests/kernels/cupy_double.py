"""CuPy without a GPU: the few calls that a device makes, performed late and checked strictly.

Streams are queues that nobody empties until something waits for them, so whatever a device does too
early, or with memory that changes meanwhile, shows.  Every copy must lie inside memory that was
allocated, on the right side; kernels run on the host's machine, over the same addresses.
"""

import ctypes
from collections import deque
from types import SimpleNamespace

import numpy as np

from phaseloop.kernels.contract import Launch, Operand, Parameter
from phaseloop.kernels.host import Host
from phaseloop.kernels.nvrtc import Compiled

MESSAGES = {
    2: "cudaErrorMemoryAllocation: out of memory",
    35: "cudaErrorInsufficientDriver: CUDA driver version is insufficient",
    100: "cudaErrorNoDevice: no CUDA-capable device is detected",
    217: "cudaErrorPeerAccessUnsupported: peer access is not supported",
    704: "cudaErrorPeerAccessAlreadyEnabled: peer access is already enabled",
    900: "cudaErrorStreamCaptureUnsupported: operation not permitted when stream is capturing",
}


class CudaError(RuntimeError):
    def __init__(self, status):
        self.status = status
        super().__init__(MESSAGES[status])


class DriverError(CudaError):
    pass


CURRENT: list["Stream"] = []  # as `with stream:` makes them


class Stream:
    def __init__(self, null=False, non_blocking=False, ptds=False, priority=None):
        assert non_blocking, "a stream that waits for the null stream cannot overlap"
        self.ptr = id(self)
        self.queue, self.done, self.captured = deque(), 0, None
        STREAMS[self.ptr] = self

    def __enter__(self):
        CURRENT.append(self)

    def __exit__(self, *_):
        CURRENT.pop()

    def add(self, step):
        (self.queue if self.captured is None else self.captured).append(step)

    @property
    def queued(self):
        return self.done + len(self.queue)

    def drain(self, upto=None):
        while self.queue and (upto is None or self.done < upto):
            step = self.queue.popleft()
            self.done += 1
            step()

    def synchronize(self):
        if self.captured is not None:
            raise CudaError(900)
        self.drain()

    def record(self, event=None):
        event.record(self)
        return event

    def wait_event(self, event):
        self.add(event.synchronize)

    def begin_capture(self, mode=None):
        assert self.captured is None
        self.captured = []

    def end_capture(self):
        steps, self.captured = self.captured, None
        return Graph(steps)


STREAMS: dict[int, Stream] = {}


class Graph:
    def __init__(self, steps):
        self.steps = steps

    def upload(self, stream=None):
        pass

    def launch(self, stream=None):
        for step in self.steps:
            stream.add(step)


class Event:
    def __init__(self, block=False, disable_timing=False, interprocess=False):
        self.stream = None

    def record(self, stream=None):
        self.stream, self.place = stream, stream.queued

    def synchronize(self):
        self.stream.drain(self.place)


class Pointer:
    """MemoryPointer, and the UnownedMemory beneath it."""

    def __init__(self, mem, offset):
        self.ptr, self.device_id = mem.ptr + offset, mem.device_id


class Array:
    """cupy.ndarray over memory that is there; CuPy would compile a kernel for anything else."""

    def __init__(self, shape, dtype=float, memptr=None, strides=None, order="C"):
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        memory = (ctypes.c_uint8 * size).from_address(memptr.ptr)
        self._over(np.frombuffer(memory, np.uint8).view(dtype).reshape(shape), memptr.device_id)

    def _over(self, host, device_id):
        self.host, self.shape, self.dtype = host, host.shape, host.dtype
        self.strides, self.nbytes = host.strides, host.nbytes
        self.data = SimpleNamespace(ptr=host.ctypes.data, device_id=device_id)
        return self

    def _like(self, host):
        return Array.__new__(Array)._over(host, self.data.device_id)

    def __getitem__(self, key):
        return self._like(self.host[key])

    def view(self, dtype):
        return self._like(self.host.view(dtype))

    def reshape(self, *shape):
        return self._like(self.host.reshape(*shape))


class Function:
    def __init__(self, machine, source, entry):
        self.machine, self.source, self.entry, self.ptr = machine, source, entry, id(self)
        self.shared_max = 48 << 10
        machine.functions[self.ptr] = self

    def __call__(self, grid, block, args, shared_mem=0, stream=None):
        assert shared_mem <= self.shared_max, "more shared memory than was asked for"
        device = self.machine.current
        arguments = tuple(self.argument(one, device) for one in args)
        launch = Launch(self.source, self.entry, grid, block, arguments, shared_mem)
        stream.add(lambda: self.machine.host.run(launch))

    def argument(self, value, device):
        if isinstance(value, np.uint64):
            assert value == 0, "an address that CuPy does not know"
            return Operand("null", None, "read")
        if isinstance(value, np.generic):
            return Parameter("value", value)
        assert value.device_id == device
        return Operand("array", self.machine.behind(value.ptr, device), "update")


class Module:
    def __init__(self, machine):
        self.machine = machine

    def load(self, cubin):
        self.source = cubin.decode()

    def get_function(self, name):
        return Function(self.machine, self.source, name)


def fake_cubin(source, entries, *, architecture):
    """In the place of loader.cubin: code that the double runs on the host's machine."""
    return Compiled(source.encode(), {entry: entry for entry in entries}, {}, {})


class Machine:
    """`cupy` for some devices.  `corrupts`: ordered pairs whose peer copies change a byte;

    `reaches`: those that the driver offers; `free_bytes`: what can be allocated on each; `cublas`:
    in its place, or there is none.  Whatever is done on a stream takes a millisecond.
    """

    __version__ = "14.2.0"

    def __init__(
        self,
        count=1,
        *,
        compute=(7, 0),
        cuda=12090,
        free_bytes=1 << 30,
        reaches=(),
        corrupts=(),
        cublas=None,
    ):
        self.count, self.compute, self.cuda_version = count, compute, cuda
        self.free_bytes, self.reaches, self.corrupts = [free_bytes] * count, reaches, corrupts
        self.current, self.failure, self.host = 0, None, Host()
        self.blocks, self.enabled, self.functions, self.copies = {}, set(), {}, []
        self.ndarray = Array
        driver = SimpleNamespace(CUDADriverError=DriverError, funcSetAttribute=self.set_attribute)
        self.cuda = Cuda(
            cublas=cublas,
            get_elapsed_time=lambda start, end: float(end.place - start.place),
            runtime=Runtime(self),
            driver=driver,
            function=SimpleNamespace(Module=lambda: Module(self)),
            Device=lambda index: Current(self, index),
            Stream=Stream,
            Event=Event,
            UnownedMemory=lambda ptr, size, owner, device_id=-1: SimpleNamespace(
                ptr=ptr, device_id=device_id
            ),
            MemoryPointer=Pointer,
        )

    def set_attribute(self, f, attribute, value):
        assert attribute == 8
        self.functions[f].shared_max = value

    def allocate(self, size, device):
        whole = np.full(size + 256, 0xFF, np.uint8)
        begin = -whole.ctypes.data % 256  # as cudaMalloc aligns
        memory = whole[begin : begin + size]
        self.blocks[memory.ctypes.data] = (memory, device)
        return memory.ctypes.data

    def behind(self, address, device, size=None):
        """What was allocated from an address on; `device` None is the host."""
        for begin, (memory, place) in self.blocks.items():
            if begin <= address < begin + memory.nbytes:
                assert place == device, f"memory of {place}, not of {device}"
                found = memory[address - begin :]
                assert size is None or size <= found.nbytes, "beyond what was allocated"
                return found
        raise AssertionError(f"{address:#x} was never allocated")


class Cuda(SimpleNamespace):
    """cupy.cuda, which looks for libraries when they are asked for."""

    def __getattribute__(self, name):
        found = super().__getattribute__(name)
        if name == "cublas" and found is None:
            raise ImportError("libcublas.so was not found")
        return found


class Current:
    def __init__(self, machine, index):
        self.machine, self.index = machine, index

    def __enter__(self):
        self.before, self.machine.current = self.machine.current, self.index

    def __exit__(self, *_):
        self.machine.current = self.before


class Runtime:
    CUDARuntimeError = CudaError

    def __init__(self, machine):
        self._machine = machine

    def getDeviceCount(self):
        if self._machine.failure is not None:
            raise CudaError(self._machine.failure)
        return self._machine.count

    def runtimeGetVersion(self):
        return self._machine.cuda_version

    def getDeviceProperties(self, device):
        return {"name": b"Double GPU"}

    def deviceGetAttribute(self, attrib, device):
        major, minor = self._machine.compute
        return {38: 6 << 20, 75: major, 76: minor, 97: 96 << 10}[attrib]

    def malloc(self, size):
        machine = self._machine
        if size > machine.free_bytes[machine.current]:
            raise CudaError(2)
        machine.free_bytes[machine.current] -= size
        return machine.allocate(size, machine.current)

    def free(self, ptr):
        memory, device = self._machine.blocks.pop(ptr)
        self._machine.free_bytes[device] += memory.nbytes

    def memGetInfo(self):
        return self._machine.free_bytes[self._machine.current], 1 << 30

    def hostAlloc(self, size, flags):
        return self._machine.allocate(size, None)

    def freeHost(self, ptr):
        del self._machine.blocks[ptr]

    def memcpyAsync(self, dst, src, size, kind, stream):
        here = self._machine.current
        source, target = {1: (None, here), 2: (here, None), 3: (here, here)}[kind]
        self._queue(stream, (dst, target), (src, source), size)

    def memcpyPeerAsync(self, dst, dstDevice, src, srcDevice, size, stream):
        assert (srcDevice, dstDevice) in self._machine.enabled, "a peer that was never enabled"
        self._queue(stream, (dst, dstDevice), (src, srcDevice), size)
        if (srcDevice, dstDevice) in self._machine.corrupts:
            target = self._machine.behind(dst, dstDevice)
            STREAMS[stream].add(lambda: target.__setitem__(size // 2, target[size // 2] ^ 1))

    def _queue(self, stream, target, source, size):
        to, begin = self._machine.behind(*target, size), self._machine.behind(*source, size)
        self._machine.copies.append((source[1], target[1]))
        STREAMS[stream].add(lambda: to.__setitem__(slice(size), begin[:size]))

    def memsetAsync(self, ptr, value, size, stream):
        target = self._machine.behind(ptr, self._machine.current, size)
        STREAMS[stream].add(lambda: target[:size].fill(value))

    def deviceCanAccessPeer(self, device, peerDevice):
        return (peerDevice, device) in self._machine.reaches

    def deviceEnablePeerAccess(self, peerDevice):
        pair = (peerDevice, self._machine.current)
        if pair in self._machine.enabled:
            raise CudaError(704)
        self._machine.enabled.add(pair)

    def deviceDisablePeerAccess(self, peerDevice):
        self._machine.enabled.remove((peerDevice, self._machine.current))
