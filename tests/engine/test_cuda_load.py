"""Goal: what does not fit on a GPU, or cannot be computed there, is refused by name, with a remedy.

Method: plans of tiny models against devices of stated memory, one of which is then made on the
host's shim with just so much; weights that break logits; and types that have no kernels.
"""

import numpy as np
import pytest

pytest.importorskip("gguf")
pytest.importorskip("ggml")

from answers import GREEDY, Job, serve
from msgspec.structs import replace
from real_geometry import LAYERS, write
from synthetic import decoder_file

from phaseloop.engine.cuda_load import (
    CudaOptions,
    check_room,
    context_that_fits,
    cuda_engine,
    plan_cuda,
)
from phaseloop.engine.sampling import ChainSampler
from phaseloop.kernels.budgets import read_budgets
from phaseloop.kernels.device import DeviceMemoryError, HostDevice
from phaseloop.model.device_plan import ALLOWANCE_BYTES
from phaseloop.model.load import load_model
from phaseloop.model.weights import open_weights
from phaseloop.ops.cuda_plan import trial
from phaseloop.ops.cuda_shape import PassShape
from phaseloop.ops.interface import BackendError

OPTIONS = CudaOptions(slot_count=2, context_length=512, ubatch_tokens=64)
SPARE = 1 << 30


def opened(file, folder):
    weights = open_weights(file.write(folder / "tiny.gguf"))
    return weights, load_model(weights)


def engine_of(weights, model, devices, options=OPTIONS):
    plan = plan_cuda(weights, model, options, None)
    return cuda_engine(weights, model, devices, plan, ChainSampler(), frozenset())


def test_a_plan_counts_what_is_allocated(tmp_path):
    """F16 weights are as large as in the file; of pages there are four, and one to shift into."""
    weights, model = opened(decoder_file("llama", "F16"), tmp_path)
    for cache, position in (("F16", 2 * 2 * 2 * 64 * 2), ("Q8_0", 2 * 2 * 2 * 64 // 32 * 34)):
        options = replace(OPTIONS, cache=cache, split=(2.0, 1.0))
        plan = plan_cuda(weights, model, options, None)
        assert sum(one.weights_bytes for one in plan.devices) >= weights.size_bytes
        assert sum(one.weights_bytes for one in plan.devices) < weights.size_bytes + (1 << 16)
        cached = sum(plan.prepared.bytes_of(device).cache for device in (0, 1))
        unpacked = 0 if cache == "F16" else 2 * 2 * 64 * 2 * 256 * 2  # for one region, on device 0
        assert cached == 5 * 256 * position + unpacked
        assert [one.layer_count for one in plan.devices] == [2, 0]
        devices = [HostDevice(0, memory_limit=SPARE), HostDevice(1, memory_limit=SPARE)]
        engine_of(weights, model, devices, options)
        for index, (device, planned) in enumerate(zip(devices, plan.devices, strict=True)):
            total, free = device.memory_bytes()
            held = planned.total_bytes - ALLOWANCE_BYTES
            assert held <= total - free < held + (1 << 16), index


def test_the_plan_of_a_large_hybrid_over_four_gpus(tmp_path):
    """All of its kernels have budgets; weights are as large as in the file, but for filled-up rows.

    The block that drafts is counted among the layers, and is not loaded.
    """
    write(tmp_path / "model.gguf")
    weights = open_weights(tmp_path / "model.gguf")
    model = load_model(weights)
    options = CudaOptions(
        slot_count=4, context_length=1 << 18, page_count=1024, split=(1.0,) * 4, ubatch_tokens=2048
    )
    plan = plan_cuda(weights, model, options, (16 * SPARE,) * 4)
    check_room(weights, model, plan)
    used = sum(
        weight.data.nbytes
        for name, weight in weights.tensors.items()
        if not name.startswith(f"blk.{LAYERS}.")
    )
    planned = sum(one.weights_bytes for one in plan.devices)
    assert used <= planned < 1.001 * used
    assert sum(one.layer_count for one in plan.devices) == LAYERS + 1  # with the draft block
    budgets = {(budget.source, budget.entry) for budget in read_budgets()}
    for launches in plan.prepared.launches:
        assert launches <= budgets
    shape = PassShape(True, ((1, 1),), None, 16)
    launches = trial(plan.subject, plan.prepared.needs, shape).launches
    assert sum(map(len, launches)) < 1000  # 14 per layer


def test_a_device_with_less_memory_than_planned_says_so(tmp_path):
    weights, model = opened(decoder_file("llama", "Q8_0"), tmp_path)
    with pytest.raises(DeviceMemoryError, match=r"host shim 0: .* bytes wanted, .* are free"):
        engine_of(weights, model, [HostDevice(0, memory_limit=1 << 20)])


def test_what_does_not_fit_is_refused_with_what_would(tmp_path):
    weights, model = opened(decoder_file("llama", "Q8_0"), tmp_path)
    roomy = plan_cuda(weights, model, OPTIONS, (SPARE,))
    check_room(weights, model, roomy)
    needed = roomy.devices[0].total_bytes
    tight = plan_cuda(weights, model, OPTIONS, (needed - 1,))
    with pytest.raises(BackendError, match=r"GPU 0: 2 layers.*: does not fit; .*-c 768.* would"):
        check_room(weights, model, tight)
    assert context_that_fits(roomy) == 1024
    assert context_that_fits(tight) == 768
    smaller = replace(OPTIONS, page_count=3)
    check_room(weights, model, plan_cuda(weights, model, smaller, (needed - 1,)))
    hopeless = plan_cuda(weights, model, OPTIONS, (ALLOWANCE_BYTES,))
    assert context_that_fits(hopeless) == 0
    with pytest.raises(BackendError, match="more GPUs or a smaller model"):
        check_room(weights, model, hopeless)


def test_a_lane_whose_logits_are_no_numbers_fails_by_name(tmp_path):
    """The last norm is so large that what it gives is beyond a half."""
    file = decoder_file("llama", "F16")
    values, kind = file.tensors["output_norm.weight"]
    file.tensors["output_norm.weight"] = values * 1e6, kind
    weights, model = opened(file, tmp_path)
    engine = engine_of(weights, model, [HostDevice()])
    (answer,) = serve(engine, [Job((1, 2, 3), 4, GREEDY)])
    assert answer.ids == ((),)
    assert answer.outcome == "failed"


@pytest.mark.parametrize("kind", ["IQ2_XS", "TQ1_0", "NVFP4"])
def test_types_without_kernels_are_refused_by_tensor_and_name(tmp_path, kind):
    weights, model = opened(decoder_file("llama", kind), tmp_path)
    with pytest.raises(BackendError, match=f"weight: type {kind} has no CUDA kernels.*--device"):
        plan_cuda(weights, model, OPTIONS, None)


def test_weights_that_halves_cannot_hold_are_refused(tmp_path):
    file = decoder_file("llama", "Q8_0")
    values, kind = file.tensors["blk.1.ffn_up.weight"]
    values = np.array(values)
    values[3, 40] = 3e6
    file.tensors["blk.1.ffn_up.weight"] = values, kind
    weights, model = opened(file, tmp_path)
    with pytest.raises(BackendError, match=r"blk.1.ffn_up.weight: row 3.*--device cpu"):
        engine_of(weights, model, [HostDevice()])
