"""The checks of `make gpu-check` in their order, and what they came to as text and as JSON."""

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
from gpu_engine import engine
from gpu_parity import FAILURES_MAX, Parity, run_tests
from gpu_progress import Progress
from gpu_report import Check, Machine, Report, text
from gpu_table import Bench, Ceilings, Reached
from kernel_shapes import cases
from kernel_shapes_attention import attention_cases

from phaseloop.kernels import nvrtc
from phaseloop.kernels.budgets import read_budgets
from phaseloop.kernels.contract import KernelError
from phaseloop.kernels.cupy_device import Cupy, CupyDevice, device_count, load_cupy
from phaseloop.kernels.driver import Driver, read_driver
from phaseloop.kernels.loader import cubin
from phaseloop.kernels.norm import rms_norm
from phaseloop.kernels.peers import PeerAccess, connect, parse_peer_access

EXIT_FAILED, EXIT_UNUSABLE = 1, 2
TESTS_SHARE = 0.6  # of the time that is left after compiling; the rest is the table's


def run(index: int, seconds: float, peer_access: str, target: Path | None) -> int:
    """The exit code.  `seconds` bounds all of it but what is under way when they are over."""
    begin_s = time.monotonic()
    try:
        access = parse_peer_access(peer_access)
        driver = usable_driver(index)
        cupy = load_cupy()
        device_count(cupy)
        device = CupyDevice(cupy, index)
    except KernelError as error:
        sys.stderr.write(f"gpu-check: {error}\n")
        return EXIT_UNUSABLE
    report = checked(cupy, device, driver, access, begin_s, seconds)
    sys.stdout.write(text(report))
    if target is not None:
        target.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    return 0 if report.is_good else EXIT_FAILED


def usable_driver(index: int) -> Driver:
    driver = read_driver()
    if not driver.gpus:
        raise KernelError(
            "the driver sees no GPU: look at `nvidia-smi -L` and at CUDA_VISIBLE_DEVICES"
        )
    if not 0 <= index < len(driver.gpus):
        raise KernelError(f"--device {index}: there are {len(driver.gpus)}, numbered from 0")
    return driver


def checked(
    cupy: Cupy,
    device: CupyDevice,
    driver: Driver,
    access: PeerAccess,
    begin_s: float,
    seconds: float,
) -> Report:
    def left_s() -> float:
        return begin_s + seconds - time.monotonic()

    described = machine(cupy, device, driver)  # while it answers
    checks = [compiled(device)]
    with Progress("tests", 1) as progress:
        parity = run_tests(device, left_s() * TESTS_SHARE, progress)
    checks.append(parity_check(parity))
    checks.append(guarded("graphs", lambda: graphs(device)))
    checks.append(guarded("engine", lambda: engine(device)))
    checks.append(guarded("peers", lambda: peers(cupy, device, access)))
    ceilings, reached = measured(cupy, device, begin_s + seconds)
    taken_s = time.monotonic() - begin_s
    return Report(described, checks, parity, ceilings, reached, taken_s)


def machine(cupy: Cupy, device: CupyDevice, driver: Driver) -> Machine:
    return Machine(
        gpu=device.name,
        architecture=device.architecture,
        memory_bytes=device.memory_bytes()[0],
        driver=driver.release or "unknown",
        cuda=".".join(map(str, driver.cuda)),
        cupy=cupy.__version__,
        nvrtc=".".join(map(str, nvrtc.version())),
    )


# --- checks ---------------------------------------------------------------------------------------


def guarded(name: str, check: Callable[[], str]) -> Check:
    """`check` says what it found, and raises KernelError where that is wrong."""
    try:
        return Check(name, True, check())
    except KernelError as error:
        return Check(name, False, str(error))


def compiled(device: CupyDevice) -> Check:
    """All kernels, several at a time, and loaded by the driver."""
    entries: dict[str, list[str]] = {}
    for budget in read_budgets():
        entries.setdefault(budget.source, []).append(budget.entry)
    begin_s = time.monotonic()

    def build(source: str) -> None:
        cubin(source, entries[source], architecture=device.architecture)

    def load() -> str:
        with Progress("compiling", len(entries)) as progress, ThreadPoolExecutor() as pool:
            for source, _ in zip(entries, pool.map(build, entries), strict=True):
                progress.step(source)
        for source, names in entries.items():
            device.load(source, names)
        count, taken_s = sum(map(len, entries.values())), time.monotonic() - begin_s
        return f"{count} kernels for {device.architecture} in {taken_s:.0f} s"

    return guarded("compile", load)


def parity_check(parity: Parity) -> Check:
    told = f"{parity.passed} passed, {len(parity.failed)} failed"
    told += f", {sum(parity.skipped.values())} skipped"
    if parity.unfinished:
        why = "too many fail" if len(parity.failed) >= FAILURES_MAX else "--seconds gives more time"
        told += f", {parity.unfinished} not run: {why}"
    return Check("parity", parity.is_good, parity.broken or told)


def graphs(device: CupyDevice) -> str:
    """A graph computes what its launch does, and follows what its operands hold."""
    rng = np.random.default_rng(0)
    x, weight, y = (device.allocate(shape, np.float32) for shape in ((3, 1024), (1024,), (3, 1024)))
    launch = rms_norm(x, weight, epsilon=1e-6, y_full=y)
    device.upload(rng.uniform(0.5, 2, 1024).astype(np.float32), weight)
    replay = device.capture(lambda: device.run(launch))
    direct, replayed = np.empty((3, 1024), np.float32), np.empty((3, 1024), np.float32)
    for _ in range(3):
        device.upload(rng.standard_normal((3, 1024)).astype(np.float32), x)
        device.run(launch)
        device.download(y, direct)
        device.zero(y)
        replay()
        device.download(y, replayed)
        if not np.array_equal(direct, replayed):
            raise KernelError("a replayed graph has other bits than its launch")
    return "replays have the bits of their launches"


def peers(cupy: Cupy, device: CupyDevice, access: PeerAccess) -> str:
    others = [CupyDevice(cupy, one) for one in range(device_count(cupy)) if one != device.index]
    if not others:
        return "one GPU, nothing to try"
    devices = sorted((device, *others), key=lambda one: one.index)
    told = [
        f"{pair.source} to {pair.target} {pair.state}: {pair.why}"
        for pair in connect(cupy, devices, access)
    ]
    for other in others:
        check_copy(device, other)
        check_copy(other, device)
        other.close()
    return "; ".join(told)


def check_copy(source: CupyDevice, target: CupyDevice) -> None:
    """By whichever way the pair has."""
    content = np.random.default_rng(1).integers(0, 256, 3 << 20, dtype=np.uint8)
    begin, end = (one.allocate(content.shape, np.uint8) for one in (source, target))
    found = np.empty_like(content)
    source.upload(content, begin)
    target.copy_from(source, begin, end)
    source.zero(begin)
    target.download(end, found)
    if not np.array_equal(found, content):
        raise KernelError(f"copies from device {source.index} to {target.index} arrive changed")


# --- figures --------------------------------------------------------------------------------------


def measured(
    cupy: Cupy, device: CupyDevice, deadline_s: float
) -> tuple[Ceilings | None, list[Reached]]:
    """Nothing where the device is lost; cases there is no time for have a note."""
    everything = [*cases(), *attention_cases()]
    try:
        bench = Bench(cupy, device)
        ceilings = bench.ceilings()
    except KernelError as error:
        return None, [Reached("", "ceilings", "", "", note=str(error))]
    found: list[Reached] = []
    with Progress("measuring", len(everything)) as progress:
        for case in everything:
            progress.step(case.name)
            if time.monotonic() > deadline_s:
                named = (case.model, case.name, case.launch.entry, case.unit)
                found.append(Reached(*named, note="no time was left"))
            else:
                found.append(bench.reach(case))
    return ceilings, found
