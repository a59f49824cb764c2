"""Kernels for the host: g++ compiles the CUDA sources against cuda/host into shared libraries.

A library holds the entries that were asked for together, and is kept under the digest of its
sources and options.
"""

import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .contract import KernelError
from .sources import build_directory, digest, source_directory

MACHINE = ("machine.cpp", "memory.cpp", "mma.cpp")
FLAGS = (
    "-std=c++17",
    "-O2",
    "-fPIC",
    "-ffp-contract=off",  # a sum of a product rounds twice, unless the kernel says otherwise
    "-fno-strict-aliasing",
    "-fvisibility=hidden",
    "-ftls-model=initial-exec",
    "-pthread",
    "-Wall",
    "-Wno-unused-function",
    "-Wno-psabi",
    "-Wno-unknown-pragmas",  # unroll
)


def host_flags() -> tuple[str, ...]:
    """x86-64 converts halves by an instruction where it has one; the bits are the same."""
    cpu = Path("/proc/cpuinfo")
    has_f16c = cpu.is_file() and " f16c " in cpu.read_text()
    return (*FLAGS, "-mf16c") if platform.machine() == "x86_64" and has_f16c else FLAGS


def compiler() -> str:
    path = shutil.which("g++")
    if path is None:
        raise KernelError("kernels on the host need g++ (12 or later): install it, say `apt g++`")
    return path


def host_library(source: Path, entries: Sequence[str], defines: Sequence[str] = ()) -> Path:
    """The shared library with `entries` of a kernel source, built unless it was before.

    Entry i is exported as `phaseloop_entry_<i>`.  Raises KernelError with the compiler's words.
    """
    machine = machine_library()
    options = (*host_flags(), *(f"-D{define}" for define in defines))
    include = f"-I{source_directory()}"
    host = source_directory() / "host"
    name = digest([source, host / "launch.hpp"], machine.name, *entries, *options)
    target = build_directory() / f"{source.stem}-{name}.so"
    if target.is_file():
        return target
    exports = "\n".join(
        f'extern "C" __attribute__((visibility("default"))) int phaseloop_entry_{index}(\n'
        "    const simt::Request* request, simt::Report* report) {\n"
        f"    return simt::launch(request, report, {entry});\n}}"
        for index, entry in enumerate(entries)
    )
    text = f'#include "{source}"\n#include "{host / "launch.hpp"}"\n{exports}\n'
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        unit, built = Path(scratch) / "entries.cpp", Path(scratch) / "library.so"
        unit.write_text(text)
        compile_with(
            ["-shared", *options, include, str(unit), str(machine), "-o", str(built)], source
        )
        built.replace(target)
    return target


def machine_library() -> Path:
    """The scheduler and its checks, which all libraries of kernels share.

    Once in a process, as each library with thread-local storage of its own takes some of the little
    that a process has for those that are loaded late.
    """
    host = source_directory() / "host"
    sources = [host / name for name in MACHINE]
    flags = ("-shared", *host_flags(), "-fvisibility=default")
    target = build_directory() / f"machine-{digest(sources, *flags)}.so"
    if target.is_file():
        return target
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        built = Path(scratch) / "machine.so"
        unit = Path(scratch) / "machine_all.cpp"
        unit.write_text("".join(f'#include "{source}"\n' for source in sources))
        compile_with([*flags, str(unit), "-o", str(built)], host)
        built.replace(target)
    return target


def compile_with(arguments: list[str], what: Path) -> None:
    done = subprocess.run([compiler(), *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise KernelError(f"{what}: g++ refuses it\n{done.stderr[:4000]}")
