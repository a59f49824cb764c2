"""What of a machine's facts is a problem, and what to do about it: a pure function of them."""

from collections.abc import Iterator

from phaseloop.kernels.driver import Driver, Gpu

from .doctor_facts import Facts, Failure, Gpus, Problem, Toolkit

FREE_BYTES_MIN = 1 << 30  # of a GPU: a context, graphs and scratch take half of it
DISK_BYTES_MIN = 5 << 30  # one 8B model in four bits
SIGILL = "it was ended by signal 4"
REINSTALL = "pip install --force-reinstall --no-cache-dir --no-binary ggml-python 'phaseloop[cpu]'"
CUDA_EXTRA = "pip install 'phaseloop[cuda]'"


def problems(facts: Facts) -> tuple[Problem, ...]:
    return (*host_problems(facts), *(gpu_problems(facts) if wants_gpus(facts) else ()))


def host_problems(facts: Facts) -> Iterator[Problem]:
    if not facts.python.is_good:
        text = f"{facts.python.version} is not {facts.python.bounds}: install a newer Python"
        yield Problem("Python", text, is_fatal=True)
    for package in facts.packages:
        if package.fault is None:
            continue
        extra = f"[{package.extra}]" if package.extra else ""
        have = "" if package.found is None else f"{package.found} is "
        text = f"{have}{package.fault}, wanted is {package.bounds}: "
        text += f"pip install --upgrade 'phaseloop{extra}'"
        needs = package.extra in (None, "cpu") and package.fault != "newer than tested"
        yield Problem(package.name, text, is_fatal=needs)
    if isinstance(facts.ggml, Failure):
        hint = f", an instruction that this CPU lacks: {REINSTALL}"
        text = facts.ggml.why + (hint if facts.ggml.why == SIGILL else "")
        yield Problem("ggml", text, is_fatal=True)
    elif facts.ggml.unstable:
        kinds = ", ".join(facts.ggml.unstable)
        text = f"answers of models in {kinds} may differ with who is served beside: use other types"
        yield Problem("ggml", text, is_fatal=False)
    if facts.model_cache.free_bytes < DISK_BYTES_MIN:
        text = (
            f"{size(facts.model_cache.free_bytes)} are free in {facts.model_cache.directory}: make "
            "room, or let PHASELOOP_CACHE name another directory"
        )
        yield Problem("disk", text, is_fatal=False)


def wants_gpus(facts: Facts) -> bool:
    """Somebody installed CuPy, or there is an NVIDIA GPU; else its absence is no problem."""
    sees = isinstance(facts.driver, Driver) and bool(facts.driver.gpus)
    return sees or bool(facts.cupy_packages) or facts.has_nvidia_module


def gpu_problems(facts: Facts) -> Iterator[Problem]:
    for text in driver_texts(facts.driver):
        yield Problem("driver", text, is_fatal=False)
    gpus = facts.driver.gpus if isinstance(facts.driver, Driver) else ()
    for text in toolkit_texts(facts.toolkit, gpus):
        yield Problem("NVRTC", text, is_fatal=False)
    for text in cupy_texts(facts.cupy_packages):
        yield Problem("CuPy", text, is_fatal=False)
    for gpu in gpus:
        if gpu.free_bytes is not None and gpu.free_bytes < FREE_BYTES_MIN:
            text = (
                f"{size(gpu.free_bytes)} of {size(gpu.memory_bytes)} are free: another process "
                "holds the rest, `nvidia-smi` names it"
            )
            yield Problem(f"GPU {gpu.index}", text, is_fatal=False)
    if isinstance(facts.gpus, Failure):
        yield Problem("CuPy", f"the GPUs cannot be used: {facts.gpus.why}", is_fatal=False)
    elif facts.gpus is not None:
        yield from tried_problems(facts.gpus)
    if isinstance(facts.kernel_cache, Failure):
        yield Problem("kernel cache", facts.kernel_cache.why, is_fatal=False)


def driver_texts(driver: Driver | Failure) -> Iterator[str]:
    if isinstance(driver, Failure):
        yield driver.why
    elif not driver.gpus:
        yield "it sees no GPU: look at `nvidia-smi -L` and at CUDA_VISIBLE_DEVICES"


def toolkit_texts(toolkit: Toolkit | Failure, gpus: tuple[Gpu, ...]) -> Iterator[str]:
    if isinstance(toolkit, Failure):
        yield toolkit.why
        return
    if isinstance(toolkit.headers, Failure):
        yield toolkit.headers.why
    for gpu in gpus:
        major, minor = gpu.compute
        if 10 * major + minor not in toolkit.architectures:
            oldest, newest = min(toolkit.architectures), max(toolkit.architectures)
            remedy = CUDA_EXTRA if 10 * major + minor < oldest else "install a newer NVRTC"
            yield (
                f"{toolkit.release} compiles for compute capabilities {oldest / 10} to "
                f"{newest / 10}, not for {gpu.name} with {major}.{minor}: {remedy}"
            )


def cupy_texts(installed: tuple[str, ...]) -> Iterator[str]:
    if not installed:
        yield f"it is not installed, so GPUs cannot be used: {CUDA_EXTRA}"
    elif len(installed) > 1:
        names = " ".join(one.split()[0] for one in installed)
        both = " and ".join(installed)
        yield f"{both} overwrite each other: pip uninstall {names}, then {CUDA_EXTRA}"


def tried_problems(gpus: Gpus) -> Iterator[Problem]:
    for device in gpus.devices:
        if device.failure is not None:
            yield Problem(f"GPU {device.index}", device.failure, is_fatal=False)
    for pair in gpus.pairs:
        if pair.state in ("corrupt", "failed"):
            text = (
                f"{pair.why}: leave {pair.source}:{pair.target} out of --peer-access, and look at "
                "the machine's IOMMU and ACS settings; copies through the host's memory are used"
            )
            yield Problem(f"GPUs {pair.source} to {pair.target}", text, is_fatal=False)


def size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
