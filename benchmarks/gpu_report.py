"""What `make gpu-check` found, as lines for people; its JSON is the same structure."""

from collections.abc import Iterator, Sequence

from gpu_parity import Parity
from gpu_table import Ceilings, Reached
from msgspec import Struct

NAME_WIDTH = 62


class Check(Struct, frozen=True):
    name: str
    is_good: bool
    told: str


class Machine(Struct, frozen=True):
    gpu: str
    architecture: str
    memory_bytes: int
    driver: str
    cuda: str  # the newest that the driver serves
    cupy: str
    nvrtc: str


class Report(Struct, frozen=True):
    machine: Machine
    checks: list[Check]
    parity: Parity
    ceilings: Ceilings | None  # None: the device was lost
    kernels: list[Reached]
    seconds: float

    @property
    def is_good(self) -> bool:
        return all(check.is_good for check in self.checks) and self.ceilings is not None


def text(report: Report) -> str:
    lines = [machine_line(report.machine), ""]
    lines += [
        f"{'ok  ' if check.is_good else 'FAIL'} {check.name}: {check.told}"
        for check in report.checks
    ]
    for test, why in report.parity.failed.items():
        lines += [f"FAIL {test}", *(f"     {line}" for line in why.splitlines()[-8:])]
    for reason, count in report.parity.skipped.items():
        lines.append(f"     {count} skipped: {reason}")
    if report.ceilings is not None:
        lines += ["", *ceiling_lines(report.ceilings), "", *rows(report.kernels, report.ceilings)]
    else:
        lines += [f"FAIL {one.name}: {one.note}" for one in report.kernels]
    verdict = "all is right" if report.is_good else "something is wrong"
    return "\n".join([*lines, "", f"{verdict}, after {report.seconds:.0f} s", ""])


def machine_line(machine: Machine) -> str:
    return (
        f"{machine.gpu} ({machine.architecture}, {machine.memory_bytes / 2**30:.1f} GiB), driver "
        f"{machine.driver} for CUDA {machine.cuda}, CuPy {machine.cupy}, NVRTC {machine.nvrtc}"
    )


def ceiling_lines(ceilings: Ceilings) -> list[str]:
    gemm = f"cannot be measured: {ceilings.gemm_note}"
    if ceilings.gemm_flops is not None:
        gemm = f"{ceilings.gemm_flops / 1e12:.1f} TFLOP/s"
    return [
        f"a copy moves {ceilings.copy_bytes_s / 1e9:.0f} GB/s, read and written",
        f"cuBLAS, f16 into f32: {gemm}",
    ]


def rows(kernels: Sequence[Reached], ceilings: Ceilings) -> Iterator[str]:
    head = "model: operation"
    yield f"{head:{NAME_WIDTH}} {'us':>9} {'GB/s':>8} {'of copy':>8} {'TFLOP/s':>8} {'of GEMM':>8}"
    for one in kernels:
        name = f"{one.model}: {one.name}"
        if one.note:
            yield f"{name:{NAME_WIDTH}} {one.note}"
            continue
        share = one.bytes_s / ceilings.copy_bytes_s
        gemm = "-"
        if ceilings.gemm_flops is not None and one.unit == "HMMA":
            gemm = f"{one.flops / ceilings.gemm_flops:.0%}"
        warm = "" if one.is_cold else "  (within the L2 cache)"
        yield (
            f"{name:{NAME_WIDTH}} {one.median_us:9.1f} {one.bytes_s / 1e9:8.0f} {share:8.0%} "
            f"{one.flops / 1e12:8.2f} {gemm:>8}{warm}"
        )
