"""What NVIDIA's driver says of itself and its GPUs, by ctypes: no CuPy, no toolkit, no context.

libcuda knows the devices as programs see them, CUDA_VISIBLE_DEVICES applied; NVML, which comes with
the driver as well, knows how much of their memory is free.
"""

import ctypes

from msgspec import Struct

from .contract import KernelError

CUDA, NVML = "libcuda.so.1", "libnvidia-ml.so.1"
NAME_BYTES = 96
COMPUTE_MAJOR, COMPUTE_MINOR = 75, 76  # of CUdevice_attribute
NO_DEVICE = 100  # of CUresult
REMEDIES = {  # by CUresult
    803: "the kernel's module and the driver's library do not fit each other: restart the machine",
    804: "this driver's library is newer than this GPU's module can serve: update the driver",
    999: "the kernel's module is not loaded or is broken: `nvidia-smi`, `modprobe nvidia-uvm`",
}


class Gpu(Struct, frozen=True):
    """A device by CUDA's index.  Bytes; what is free is None where NVML does not say."""

    index: int
    name: str
    compute: tuple[int, int]
    memory_bytes: int
    free_bytes: int | None
    reaches: tuple[int, ...]  # devices whose memory the driver says it can access


class Driver(Struct, frozen=True):
    release: str | None  # as nvidia-smi prints it: "575.57.08"; None without NVML
    cuda: tuple[int, int]  # the newest CUDA that it serves
    gpus: tuple[Gpu, ...]


class Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def read_driver(cuda: str = CUDA, nvml: str = NVML) -> Driver:
    """Raises KernelError where there is no driver, or it cannot be used; says what to do."""
    try:
        library = ctypes.CDLL(cuda)
    except OSError as error:
        raise KernelError(
            f"{cuda} cannot be loaded ({error}): install NVIDIA's driver; in a container, start it "
            "with its GPUs (`docker run --gpus all`)"
        ) from error
    number = ctypes.c_int()
    ask(library, "cuDriverGetVersion", ctypes.byref(number))
    version = number.value // 1000, number.value % 1000 // 10
    code = library.cuInit(0)
    count = 0
    if code != NO_DEVICE:
        check(library, code, "cuInit")
        ask(library, "cuDeviceGetCount", ctypes.byref(number))
        count = number.value
    management = Management(nvml)
    try:
        gpus = tuple(read_gpu(library, management, index, count) for index in range(count))
        return Driver(management.release, version, gpus)
    finally:
        management.close()


def read_gpu(library: ctypes.CDLL, management: "Management", index: int, count: int) -> Gpu:
    device = device_at(library, index)
    name = ctypes.create_string_buffer(NAME_BYTES)
    ask(library, "cuDeviceGetName", name, NAME_BYTES, device)
    total = ctypes.c_size_t()
    ask(library, "cuDeviceTotalMem_v2", ctypes.byref(total), device)
    bus = ctypes.create_string_buffer(NAME_BYTES)
    ask(library, "cuDeviceGetPCIBusId", bus, NAME_BYTES, device)
    return Gpu(
        index,
        name.value.decode(errors="replace"),
        (attribute(library, COMPUTE_MAJOR, device), attribute(library, COMPUTE_MINOR, device)),
        total.value,
        management.free_bytes(bus.value),
        tuple(peer for peer in range(count) if peer != index and reaches(library, device, peer)),
    )


def device_at(library: ctypes.CDLL, index: int) -> ctypes.c_int:
    device = ctypes.c_int()
    ask(library, "cuDeviceGet", ctypes.byref(device), index)
    return device


def attribute(library: ctypes.CDLL, number: int, device: ctypes.c_int) -> int:
    value = ctypes.c_int()
    ask(library, "cuDeviceGetAttribute", ctypes.byref(value), number, device)
    return value.value


def reaches(library: ctypes.CDLL, device: ctypes.c_int, peer: int) -> bool:
    able = ctypes.c_int()
    other = device_at(library, peer)
    ask(library, "cuDeviceCanAccessPeer", ctypes.byref(able), device, other)
    return able.value != 0


def ask(library: ctypes.CDLL, name: str, *arguments: object) -> None:
    check(library, library[name](*arguments), name)


def check(library: ctypes.CDLL, code: int, what: str) -> None:
    if code == 0:
        return
    text = ctypes.c_char_p()
    library.cuGetErrorString(code, ctypes.byref(text))
    said = text.value.decode() if text.value else "unknown error"
    remedy = REMEDIES.get(code, "look at `nvidia-smi`, and at the kernel's log for NVRM")
    raise KernelError(f"the driver refuses {what}: {said} ({code}); {remedy}")


class Management:
    """NVML, where it can be used; without it nothing is known, and nothing fails."""

    def __init__(self, name: str) -> None:
        self.release: str | None = None
        self._library: ctypes.CDLL | None = None
        try:
            library = ctypes.CDLL(name)
        except OSError:
            return
        if library.nvmlInit_v2() != 0:
            return
        self._library = library
        text = ctypes.create_string_buffer(NAME_BYTES)
        if library.nvmlSystemGetDriverVersion(text, NAME_BYTES) == 0:
            self.release = text.value.decode(errors="replace")

    def free_bytes(self, bus: bytes) -> int | None:
        """Of the GPU at a PCI address, whatever its index is to NVML."""
        library = self._library
        if library is None:
            return None
        handle, memory = ctypes.c_void_p(), Memory()
        if library.nvmlDeviceGetHandleByPciBusId_v2(bus, ctypes.byref(handle)) != 0:
            return None
        if library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) != 0:
            return None
        return memory.free

    def close(self) -> None:
        if self._library is not None:
            self._library.nvmlShutdown()
