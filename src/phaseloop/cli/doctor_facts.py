"""What `phaseloop doctor` finds on a machine; its JSON is this structure."""

from msgspec import Struct

from phaseloop.kernels.driver import Driver
from phaseloop.kernels.peers import Pair

from .doctor_packages import Package, Python


class Failure(Struct, frozen=True):
    """In the place of what could not be found out, or is not there; names the remedy."""

    why: str


class Ggml(Struct, frozen=True):
    package: str
    release: str
    features: tuple[str, ...]  # of the CPU, that its kernels were built for
    threads: int  # as many as the process may use
    stable: tuple[str, ...]  # types whose rows have the same bits in any company
    unstable: tuple[str, ...]


class Toolkit(Struct, frozen=True):
    """NVRTC.  Architectures are compute capabilities times ten: 70 is Volta."""

    release: str
    architectures: tuple[int, ...]
    headers: str | Failure  # the directory of cuda_fp16.h


class Tried(Struct, frozen=True):
    """A device; `failure` says what did not work, None if a kernel computed what it should."""

    index: int
    name: str
    failure: str | None


class Gpus(Struct, frozen=True):
    cupy: str
    cuda: str  # that CuPy was built for
    devices: tuple[Tried, ...]
    pairs: tuple[Pair, ...]


class KernelCache(Struct, frozen=True):
    directory: str
    files: int
    size_bytes: int


class Disk(Struct, frozen=True):
    """Where models are kept."""

    directory: str
    free_bytes: int


class Problem(Struct, frozen=True):
    """One line on what is wrong and what to do.  `is_fatal`: serve needs it."""

    about: str
    text: str
    is_fatal: bool


class Facts(Struct, frozen=True):
    phaseloop: str
    system: str
    python: Python
    packages: tuple[Package, ...]
    ggml: Ggml | Failure
    driver: Driver | Failure
    toolkit: Toolkit | Failure
    cupy_packages: tuple[str, ...]  # "cupy-cuda12x 14.2.0"; more than one is a mistake
    gpus: Gpus | Failure | None  # None: there is nothing to try
    has_nvidia_module: bool  # the kernel's, which is there where a GPU is
    kernel_cache: KernelCache | Failure
    compiler: str | Failure  # for kernels on the host
    model_cache: Disk
