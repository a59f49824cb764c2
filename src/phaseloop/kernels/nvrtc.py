"""NVRTC through ctypes: CUDA C to a cubin, without a driver, a GPU or CuPy."""

import ctypes
import importlib.util
import os
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from msgspec import Struct

from .contract import KernelError

REMEDY = "pip install 'phaseloop[cuda]' brings NVRTC 12.x and the headers that Volta needs"
LIBRARIES = {"libnvrtc.so.12": "cuda_nvrtc", "libnvrtc.so.13": "cu13"}  # and their wheels' folders
HEADERS = {12: "cuda_runtime", 13: "cu13"}
FUNCTION = re.compile(r"Compiling entry function '(\w+)' for")
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")
ENTRY = re.compile(r"\.entry (\w+)\(")
MMA = re.compile(r"\bmma\.sync\.")
LOADS = re.compile(r"\bld\.global[\w.:]*")
NARROW = re.compile(r"\.(?:[usb]8|[usbf]16)$")  # of one value: 1 or 2 bytes


class Resources(Struct, frozen=True):
    """What the compiler says that a kernel takes, per thread; shared memory per block."""

    registers: int
    stack_bytes: int
    spill_bytes: int  # stored and loaded
    shared_bytes: int  # declared; dynamic comes on top


class Instructions(Struct, frozen=True):
    """Counts in a kernel's PTX, where loops are unrolled and ptxas has not been yet."""

    mma: int
    global_loads: int
    wide_loads: int  # of 16 bytes
    narrow_loads: int  # of 1 or 2 bytes


class Compiled(Struct, frozen=True):
    cubin: bytes
    names: dict[str, str]  # entry -> its name in the cubin
    resources: dict[str, Resources]  # by entry
    instructions: dict[str, Instructions]  # by entry


def package_directory(package: str) -> Path | None:
    """nvidia/<package> of an installed wheel."""
    spec = importlib.util.find_spec("nvidia")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        directory = Path(location) / package
        if directory.is_dir():
            return directory
    return None


@cache
def library() -> ctypes.CDLL:
    """libnvrtc.so.12, by its path; where there is none, a CUDA 13 that no longer knows Volta.

    For all to see, so that CuPy finds this one too.
    """
    failures: list[str] = []
    for name, package in LIBRARIES.items():
        directory = package_directory(package)
        path = directory / "lib" / name if directory else Path(name)
        try:
            return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            failures.append(str(error))
    raise KernelError(f"NVRTC cannot be loaded: {'; '.join(failures)}; {REMEDY}")


def include_directories() -> list[Path]:
    """Where cuda_fp16.h of this NVRTC's release lies: in its wheel, else in a toolkit."""
    package = package_directory(HEADERS.get(version()[0], "cuda_runtime"))
    toolkit = os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    for directory in filter(None, (package, Path(toolkit))):
        if (directory / "include" / "cuda_fp16.h").is_file():
            return [directory / "include"]
    raise KernelError(f"cuda_fp16.h is missing: {REMEDY}")


def version() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    check(library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
    return major.value, minor.value


def architectures() -> list[int]:
    """Compute capabilities that this NVRTC compiles for: 70 is 7.0, Volta."""
    count = ctypes.c_int()
    check(library().nvrtcGetNumSupportedArchs(ctypes.byref(count)), "nvrtcGetNumSupportedArchs")
    numbers = (ctypes.c_int * count.value)()
    check(library().nvrtcGetSupportedArchs(numbers), "nvrtcGetSupportedArchs")
    return list(numbers)


def check(code: int, what: str) -> None:
    if code != 0:
        library().nvrtcGetErrorString.restype = ctypes.c_char_p
        raise KernelError(f"{what}: {library().nvrtcGetErrorString(code).decode()}")


def compile_program(text: str, entries: Sequence[str], options: Sequence[str]) -> Compiled:
    """Compile a unit; `entries` are the template instances to keep.

    Raises KernelError with the compiler's log.
    """
    program = ctypes.c_void_p()
    lib = library()
    made = lib.nvrtcCreateProgram(
        ctypes.byref(program), text.encode(), b"phaseloop.cu", 0, None, None
    )
    check(made, "nvrtcCreateProgram")
    try:
        for entry in entries:
            check(lib.nvrtcAddNameExpression(program, entry.encode()), entry)
        words = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        code = lib.nvrtcCompileProgram(program, len(options), words)
        log = buffer_of(program, "ProgramLog").rstrip(b"\0").decode()
        if code != 0:
            raise KernelError(f"NVRTC refuses {', '.join(entries)}\n{log[:4000]}")
        names = {entry: lowered_name(program, entry) for entry in entries}
        ptx = buffer_of(program, "PTX").rstrip(b"\0").decode()
        return Compiled(
            cubin=buffer_of(program, "CUBIN"),
            names=names,
            resources=resources_of(log, names),
            instructions=instructions_of(ptx, names),
        )
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def buffer_of(program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    check(library()[f"nvrtcGet{what}Size"](program, ctypes.byref(size)), what)
    buffer = ctypes.create_string_buffer(size.value)
    check(library()[f"nvrtcGet{what}"](program, buffer), what)
    return buffer.raw


def lowered_name(program: ctypes.c_void_p, entry: str) -> str:
    name = ctypes.c_char_p()
    check(
        library().nvrtcGetLoweredName(program, entry.encode(), ctypes.byref(name)),
        f"nvrtcGetLoweredName({entry})",
    )
    assert name.value is not None
    return name.value.decode()


def resources_of(log: str, names: dict[str, str]) -> dict[str, Resources]:
    """Read ptxas's log (--ptxas-options=-v): one passage per kernel."""
    entries = {name: entry for entry, name in names.items()}
    passages = FUNCTION.split(log)[1:]
    found: dict[str, Resources] = {}
    for name, passage in zip(passages[::2], passages[1::2], strict=True):
        used, spills, shared = USED.search(passage), SPILLS.search(passage), SHARED.search(passage)
        if name not in entries or used is None or spills is None:
            continue
        stack, stored, loaded = map(int, spills.groups())
        found[entries[name]] = Resources(
            registers=int(used[1]),
            stack_bytes=stack,
            spill_bytes=stored + loaded,
            shared_bytes=int(shared[1]) if shared else 0,
        )
    if missing := [entry for entry in names if entry not in found]:
        raise KernelError(f"the compiler's log says nothing about {missing}:\n{log[:4000]}")
    return found


def instructions_of(ptx: str, names: dict[str, str]) -> dict[str, Instructions]:
    passages = ENTRY.split(ptx)[1:]
    bodies = dict(zip(passages[::2], passages[1::2], strict=True))
    return {entry: count_instructions(bodies[name]) for entry, name in names.items()}


def count_instructions(body: str) -> Instructions:
    loads: list[str] = LOADS.findall(body)
    return Instructions(
        mma=len(MMA.findall(body)),
        global_loads=len(loads),
        wide_loads=sum(".v4.u32" in load or ".v4.f32" in load for load in loads),
        narrow_loads=sum(NARROW.search(load) is not None and ".v" not in load for load in loads),
    )
