"""Finds out what a machine has.  What may crash or hang is tried in a process of its own."""

import importlib.util
import platform
import shutil
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import TypeVar

import msgspec

from phaseloop import __version__
from phaseloop.kernels import nvrtc
from phaseloop.kernels.contract import KernelError
from phaseloop.kernels.driver import Driver, read_driver
from phaseloop.kernels.host_build import compiler
from phaseloop.kernels.sources import build_directory

from .doctor_facts import Disk, Facts, Failure, Ggml, Gpus, KernelCache, Toolkit
from .doctor_packages import packages, python_of
from .model_cache import cache_directory

Found = TypeVar("Found")
CHILD_S_MAX = 120  # a first start of CUDA takes seconds, each GPU and each pair some more
COMPILER_S_MAX = 20
NVIDIA_MODULE = Path("/proc/driver/nvidia/version")
BUILT = ("*.cubin", "*.so")


def examine(peers: str) -> Facts:
    """`peers` are the pairs of GPUs to try, as PeerAccess has them."""
    driver, cupy = driver_of(), cupy_packages()
    return Facts(
        phaseloop=__version__,
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=python_of(platform.python_version()),
        packages=tuple(packages()),
        ggml=ggml_of(),
        driver=driver,
        toolkit=toolkit_of(),
        cupy_packages=cupy,
        gpus=gpus_of(peers) if cupy and isinstance(driver, Driver) and driver.gpus else None,
        has_nvidia_module=NVIDIA_MODULE.exists(),
        kernel_cache=kernel_cache_of(),
        compiler=compiler_of(),
        model_cache=disk_of(cache_directory()),
    )


def driver_of() -> Driver | Failure:
    try:
        return read_driver()
    except KernelError as error:
        return Failure(str(error))


def toolkit_of() -> Toolkit | Failure:
    try:
        release, architectures = nvrtc.version(), nvrtc.architectures()
    except KernelError as error:
        return Failure(str(error))
    try:
        headers = str(nvrtc.include_directories()[0])
    except KernelError as error:
        headers = Failure(str(error))
    return Toolkit(".".join(map(str, release)), tuple(architectures), headers)


def cupy_packages() -> tuple[str, ...]:
    """All that are installed: two of them overwrite each other's files."""
    found = {
        f"{one.name} {one.version}" for one in distributions() if is_cupy(one.name.lower())
    }  # an environment may list a package twice
    return tuple(sorted(found))


def is_cupy(name: str) -> bool:
    return name == "cupy" or name.startswith("cupy-cuda")


def kernel_cache_of() -> KernelCache | Failure:
    try:
        directory = build_directory()
    except KernelError as error:
        return Failure(str(error))
    sizes = [path.stat().st_size for path in built_in(directory)]
    return KernelCache(str(directory), len(sizes), sum(sizes))


def built_in(directory: Path) -> list[Path]:
    return [path for pattern in BUILT for path in directory.glob(pattern) if path.is_file()]


def clear_kernel_cache() -> tuple[int, int]:
    """Remove what was built: -> files, bytes.  Raises KernelError, OSError."""
    files = built_in(build_directory())
    size = sum(path.stat().st_size for path in files)
    for path in files:
        path.unlink(missing_ok=True)
    return len(files), size


def compiler_of() -> str | Failure:
    try:
        path = compiler()
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, check=True, timeout=COMPILER_S_MAX
        )
    except (KernelError, OSError, subprocess.SubprocessError) as error:
        return Failure(str(error))
    return f"{path}: {done.stdout.partition(chr(10))[0]}"


def disk_of(directory: Path) -> Disk:
    """What is free where it would be created, if it is not there."""
    there = next(path for path in (directory, *directory.parents) if path.exists())
    return Disk(str(directory), shutil.disk_usage(there).free)


# --- in processes of their own --------------------------------------------------------------------


def ggml_of() -> Ggml | Failure:
    if importlib.util.find_spec("ggml") is None:
        return Failure("it is not installed: pip install 'phaseloop[cpu]'")
    return answer_of("phaseloop.cli.doctor_ggml", [], Ggml)


def gpus_of(peers: str) -> Gpus | Failure:
    return answer_of("phaseloop.cli.doctor_gpus", [peers], Gpus)


def answer_of(
    module: str, arguments: list[str], kind: type[Found], *, seconds: float = CHILD_S_MAX
) -> Found | Failure:
    """What a module prints as JSON, or how it ended instead."""
    command = [sys.executable, "-P", "-m", module, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=seconds)
    except subprocess.TimeoutExpired:
        return Failure(f"no answer within {seconds:.0f} s; it hangs, and was ended")
    if done.returncode < 0:
        return Failure(f"it was ended by signal {-done.returncode}")
    if done.returncode > 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        return Failure(lines[-1] if lines else f"exit code {done.returncode}")
    return msgspec.json.decode(done.stdout, type=kind)
