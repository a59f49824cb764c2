"""Goal: a CUDA device does what Device promises, in that order, by calls that CuPy really has.

Method: a double of CuPy whose streams do nothing until somebody waits, over memory whose bounds and
place are checked; kernels run on the host's machine.  Where CuPy is installed, every call that the
double answers is looked up in it.
"""

import importlib.util
import inspect
import re

import numpy as np
import pytest
from cupy_double import Event, Machine, Module, Runtime, Stream, fake_cubin
from kernel_blocks import random_matrix

from phaseloop.kernels import cupy_device, nvrtc
from phaseloop.kernels.contract import KernelError, Launch, i32, reads, writes
from phaseloop.kernels.cupy_device import CupyDevice, device_count, load_cupy
from phaseloop.kernels.device import DeviceMemoryError, part
from phaseloop.kernels.norm import rms_norm
from phaseloop.kernels.skinny import skinny

STAGED = 1 << 12  # bytes; small, so that the halves of staging take turns


@pytest.fixture(autouse=True)
def _kernels_run_on_the_host(monkeypatch):
    monkeypatch.setattr(cupy_device, "cubin", fake_cubin)


@pytest.fixture
def machine():
    return Machine(2)


@pytest.fixture
def device(machine):
    return CupyDevice(machine, 0, staged_bytes=STAGED)


def uploaded(device, content):
    array = device.allocate(content.shape, content.dtype)
    device.upload(content, array)
    return array


def downloaded(device, array):
    found = np.empty(array.shape, array.dtype)
    device.download(array, found)
    return found


@pytest.mark.parametrize("size", [0, 1, STAGED - 1, STAGED, STAGED + 1, 7 * STAGED + 3])
def test_what_goes_up_comes_down(device, size):
    content = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    assert np.array_equal(downloaded(device, uploaded(device, content)), content)


def test_a_source_may_change_as_soon_as_it_is_uploaded(device):
    """Twenty small uploads share halves; none is performed before the download waits."""
    content = np.zeros(500, np.int32)
    arrays = []
    for value in range(20):
        content[:] = value
        arrays.append(uploaded(device, content))
    content[:] = -1
    for value, array in enumerate(arrays):
        assert (downloaded(device, array) == value).all()


def test_parts_of_an_arena_are_arrays(device):
    arena = device.allocate((1024,), np.uint8)
    half = part(arena, 256, (3, 8), np.float16)
    content = np.arange(24, dtype=np.float16).reshape(3, 8)
    device.zero(arena)
    device.upload(content, half)
    whole = downloaded(device, arena)
    assert np.array_equal(whole[256:304].view(np.float16).reshape(3, 8), content)
    assert not whole[:256].any()
    assert not whole[304:].any()
    device.copy(half, part(arena, 512, (3, 8), np.float16))
    assert np.array_equal(downloaded(device, arena[512:560].view(np.float16)), content.reshape(-1))


def test_kernels_run_in_order_between_copies(device, host):
    """The bits are those of the same launch on the host's machine."""
    rng = np.random.default_rng(0)
    matrix = random_matrix("Q4_K", 40, 1)
    x = rng.standard_normal((3, 256)).astype(np.float16)
    wanted = np.empty((3, 40), np.float32)
    host.run(skinny(x, matrix.packed, wanted))
    data = uploaded(device, matrix.packed.data)
    packed = type(matrix.packed)("Q4_K", 40, 256, data)
    there, y = uploaded(device, x), device.allocate((3, 40), np.float32)
    device.run(skinny(there, packed, y))
    device.zero(there)  # after the kernel has read it
    assert np.array_equal(downloaded(device, y), wanted)


def test_a_graph_is_recorded_and_not_performed(device):
    x = uploaded(device, np.ones((1, 64), np.float32))
    weight = uploaded(device, np.full(64, 2, np.float32))
    y, copied = device.allocate((1, 64), np.float32), device.allocate((1, 64), np.float32)
    device.zero(y)
    device.zero(copied)

    def body():
        device.run(rms_norm(x, weight, epsilon=0.0, y_full=y))
        device.copy(y, copied)

    replay = device.capture(body)
    assert not downloaded(device, copied).any()
    replay()
    assert (downloaded(device, copied) == 2).all()
    device.upload(np.full((1, 64), -3, np.float32), x)  # same address, other content
    replay()
    assert (downloaded(device, copied) == -2).all()


def test_a_capture_that_fails_leaves_the_device_usable(device):
    array = device.allocate((4,), np.int32)
    with pytest.raises(KernelError, match="upload while a graph is captured"):
        device.capture(lambda: device.upload(np.zeros(4, np.int32), array))
    with pytest.raises(KernelError, match="allocate while a graph is captured"):
        device.capture(lambda: device.allocate((4,), np.int32))
    assert np.array_equal(downloaded(device, uploaded(device, np.arange(4))), np.arange(4))


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("is_peer", [False, True])
def test_copies_between_devices_keep_the_order(machine, is_peer, ahead):
    """Several times the staging's size, whichever device runs ahead; then source is overwritten."""
    first, second = (CupyDevice(machine, index, staged_bytes=STAGED) for index in range(2))
    if is_peer:
        machine.enabled.add((0, 1))
        second.peers.add(0)
    content = np.random.default_rng(1).integers(0, 256, 5 * STAGED + 7, dtype=np.uint8)
    source, target = uploaded(first, content), second.allocate(content.shape, np.uint8)
    second.zero(target)
    machine.copies.clear()
    second.copy_from(first, source, target)
    first.zero(source)
    (first, second)[ahead].synchronize()
    assert np.array_equal(downloaded(second, target), content)
    assert not downloaded(first, source).any()
    assert ((0, 1) in machine.copies) == is_peer
    assert ((0, None) in machine.copies[:-6]) != is_peer


def test_events_tie_devices(machine):
    first, second = (CupyDevice(machine, index, staged_bytes=STAGED) for index in range(2))
    ran = []
    first.stream.add(lambda: ran.append("first"))
    second.wait(first.record())
    second.stream.add(lambda: ran.append("second"))
    second.synchronize()
    assert ran == ["first", "second"]


def test_large_shared_memory_is_asked_for_once_and_refused_beyond_the_gpus(device):
    x, y = device.allocate((32,), np.float32), device.allocate((32,), np.float32)
    big = Launch("toy", "toy", (1, 1, 1), (32, 1, 1), (reads("x", x), writes("y", y)), 64 << 10)
    device.run(big)  # the double refuses a function that was not promised so much
    too_big = Launch("toy", "toy", (1, 1, 1), (32, 1, 1), (), 97 << 10)
    with pytest.raises(KernelError, match=r"toy: wants 99328 bytes .* Double GPU has 98304"):
        device.run(too_big)


def test_arrays_of_others_are_refused(machine, device):
    other = CupyDevice(machine, 1, staged_bytes=STAGED)
    there, here = other.allocate((4,), np.int32), device.allocate((4,), np.int32)
    with pytest.raises(KernelError, match="x: lies in device 1, not on device 0"):
        device.run(Launch("toy", "toy", (1, 1, 1), (32, 1, 1), (reads("x", there), i32("n", 1))))
    with pytest.raises(KernelError, match="lies in the host's memory"):
        device.copy(np.zeros(4, np.int32), here)
    with pytest.raises(KernelError, match="upload: 16 bytes for 12"):
        device.upload(np.zeros(4, np.int32), here[:3])
    with pytest.raises(KernelError, match="must be C-contiguous"):
        device.copy(here[::2], here[:2])


def test_memory_that_ends_is_told(machine):
    machine.free_bytes[0] = 1000
    device = CupyDevice(machine, 0, staged_bytes=STAGED)
    held = device.allocate((900,), np.uint8)
    assert device.memory_bytes() == (1 << 30, 100)
    with pytest.raises(DeviceMemoryError, match=r"allocating 400 bytes.* 100 of .* are free"):
        device.allocate((100,), np.float32)
    device.release(held)
    assert device.memory_bytes()[1] == 1000


def test_closing_gives_all_memory_back(machine, device):
    device.allocate((10,), np.float32)
    uploaded(device, np.arange(5))
    device.close()
    device.close()
    assert not machine.blocks


def test_a_gpu_that_this_cuda_gave_up_is_told():
    with pytest.raises(KernelError, match=r"capability 7.0, .* CUDA 13.2, .* pip uninstall"):
        CupyDevice(Machine(cuda=13020), 0)
    turing = CupyDevice(Machine(cuda=13020, compute=(7, 5)), 0)
    assert turing.architecture == "sm_75"
    assert CupyDevice(Machine(), 0).architecture == "sm_70"


def test_a_driver_that_is_old_or_missing_is_told(machine):
    assert device_count(machine) == 2
    for status, remedy in ((35, "driver is older"), (100, "no GPU is visible: look at nvidia-smi")):
        machine.failure = status
        with pytest.raises(KernelError, match=remedy):
            device_count(machine)


def test_without_cupy_the_message_says_what_to_install(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named '{name}'")

    monkeypatch.setattr(cupy_device.importlib, "import_module", missing)
    with pytest.raises(KernelError, match=r"No module named 'cupy'.*pip install 'phaseloop\[cuda]"):
        load_cupy()


def test_nvrtc_is_loaded_before_cupy_looks_for_one(monkeypatch):
    order = []
    monkeypatch.setattr(nvrtc, "library", lambda: order.append("nvrtc"))
    monkeypatch.setattr(cupy_device.importlib, "import_module", order.append)
    load_cupy()
    assert order == ["nvrtc", "cupy"]


# --- the real CuPy --------------------------------------------------------------------------------

NAMES = {  # of our double -> of CuPy; parameters are compared
    Stream: "cuda.Stream",
    Event: "cuda.Event",
    Module: "cuda.function.Module",
    Runtime: "cuda.runtime",
}


def test_the_double_answers_as_cupy_would():
    """Every call by name, and by the names of its parameters as CuPy documents them."""
    if importlib.util.find_spec("cupy") is None:
        pytest.skip("CuPy is not installed: pip install cupy-cuda12x")
    cupy = load_cupy()
    assert issubclass(cupy.cuda.runtime.CUDARuntimeError, RuntimeError)
    assert issubclass(cupy.cuda.driver.CUDADriverError, RuntimeError)
    for ours, name in NAMES.items():
        theirs = cupy
        for each in name.split("."):
            theirs = getattr(theirs, each)
        for method, function in inspect.getmembers(ours, inspect.isfunction):
            if method.startswith("_") or method in ("add", "drain"):
                continue
            wanted = [each for each in inspect.signature(function).parameters if each != "self"]
            assert wanted == parameters(getattr(theirs, method)), f"{name}.{method}"
    assert parameters(cupy.cuda.driver.funcSetAttribute) == ["f", "attribute", "value"]
    assert parameters(cupy.cuda.UnownedMemory) == ["ptr", "size", "owner", "device_id"]
    assert parameters(cupy.cuda.MemoryPointer) == ["mem", "offset"]
    assert parameters(cupy.cuda.graph.Graph.launch) == ["stream"]
    assert parameters(cupy.cuda.graph.Graph.upload) == ["stream"]
    assert callable(cupy.cuda.function.Function.__call__)
    assert {"shape", "dtype", "memptr"} <= set(re.findall(r"\w+", cupy.ndarray.__doc__))
    assert callable(cupy.cuda.Device.__enter__)


def parameters(function):
    """As declared, or as the first line of a compiled function's documentation has them."""
    try:
        found = [*inspect.signature(function).parameters]
    except (TypeError, ValueError):
        inside = re.search(r"\((.*?)\)", function.__doc__.splitlines()[0])
        found = [re.split(r"[ =]", each.split("=")[0].strip())[-1] for each in inside[1].split(",")]
    return [each for each in found if each not in ("self", "")]
