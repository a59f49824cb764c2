"""Cubins of the CUDA sources, compiled once and kept under the digest of sources and options."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from . import nvrtc
from .contract import KernelError
from .nvrtc import Compiled
from .sources import build_directory, digest, source_directory, write_atomically

VOLTA = "sm_70"
OPTIONS = (
    "-std=c++17",
    "-default-device",
    "--ptxas-options=-v",  # its log is where registers and spills are read
    "-diag-suppress=177",  # a helper of common.cuh that this source does not use
)


def cubin(
    source: str,
    entries: Sequence[str],
    *,
    architecture: str = VOLTA,
    directory: Path | None = None,
) -> Compiled:
    """Compile entries of cuda/<source>.cu for an architecture, or find what an earlier run built.

    Raises KernelError where NVRTC is missing, too new for the architecture, or refuses the source.
    """
    path = (directory or source_directory()) / f"{source}.cu"
    options = [f"-arch={architecture}", *OPTIONS]
    release = ".".join(map(str, nvrtc.version()))
    kept = build_directory() / f"{source}-{digest([path], release, *entries, *options)}.cubin"
    if kept.is_file():
        return msgspec.msgpack.decode(kept.read_bytes(), type=Compiled)
    check_architecture(architecture, release)
    includes = [
        f"-I{include}"
        for include in (path.parent, source_directory(), *nvrtc.include_directories())
    ]
    compiled = nvrtc.compile_program(f'#include "{path.name}"\n', entries, [*options, *includes])
    write_atomically(kept, msgspec.msgpack.encode(compiled))
    return compiled


def check_architecture(architecture: str, release: str) -> None:
    number = int(architecture.removeprefix("sm_"))
    known = nvrtc.architectures()
    if number not in known:
        raise KernelError(
            f"NVRTC {release} compiles for compute capabilities {min(known)} to {max(known)}, not "
            f"for {number}: {nvrtc.REMEDY}"
        )
