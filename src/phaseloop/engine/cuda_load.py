"""From a model to an engine on GPUs, or on the shim that runs their kernels on the host."""

import re
from collections.abc import Callable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from phaseloop.model.device_plan import (
    ALLOWANCE_BYTES,
    DevicePlan,
    Wanted,
    advice,
    fits,
    plan_devices,
    share_out,
)
from phaseloop.model.plan import state_bytes
from phaseloop.model.shape import Model
from phaseloop.model.weights import Weights
from phaseloop.ops.cuda import CudaBackend
from phaseloop.ops.cuda_devices import CacheType, Device
from phaseloop.ops.cuda_plan import Subject
from phaseloop.ops.cuda_prepare import Options, Prepared, prepare
from phaseloop.ops.delta_states import MARKS_MAX
from phaseloop.ops.interface import BackendError

from .cpu import ModelEngine
from .draft import Drafter
from .reuse import STEP, states_per_slot
from .sampler import Sampler
from .snapshots import Snapshots
from .speculate import USUAL, Terms

BLOCK = re.compile(r"blk\.(\d+)\.")
PAGE_LENGTH = 256


class CudaOptions(Struct, frozen=True):
    """What an operator decides.  Tokens for lengths.

    `split`: proportions of the layers, one per device.  `page_count`: of 256 tokens, of all slots
    together; None: as many as they could use.
    """

    slot_count: int = 4
    context_length: int | None = None  # of one sequence; None: what the model was trained for
    batch_tokens: int = 2048
    ubatch_tokens: int = 512
    cache: CacheType = "F16"
    split: tuple[float, ...] = (1.0,)
    reuse_generated: bool = False
    cache_ram_bytes: int = 0  # of prefixes that slots had to give up; 0 keeps none
    page_count: int | None = None
    states_max: int = MARKS_MAX  # recurrent states kept per slot, of a model that has some
    state_step: int = STEP  # tokens of a prompt from one of them to the next
    builds: bool = False  # all kernels now, not when they are first wanted


class CudaPlan(Struct, frozen=True):
    """What would be loaded, and the bytes that it takes of each device."""

    subject: Subject
    prepared: Prepared
    options: CudaOptions
    devices: tuple[DevicePlan, ...]

    @property
    def fits(self) -> bool:
        return fits(self.devices)

    def describe(self) -> list[str]:
        """A line per device."""
        return [f"GPU {index}: {one.describe()}" for index, one in enumerate(self.devices)]


def plan_cuda(
    weights: Weights, model: Model, options: CudaOptions, available: Sequence[int] | None
) -> CudaPlan:
    """`available`: bytes of each device, None where nobody knows.

    Raises BackendError for a model that the kernels cannot run.
    """
    subject = subject_of(weights, model, options.split)
    prepared = prepare(subject, backend_options(model, options))
    places = places_of(weights, options.split)
    plans: list[DevicePlan] = []
    for device in range(len(options.split)):
        found = prepared.bytes_of(device)
        held = found.weights + found.cache + found.states
        plans.append(
            DevicePlan(
                layer_count=places[:-1].count(device),
                weights_bytes=found.weights,
                cache_bytes=found.cache,
                states_bytes=found.states,
                scratch_bytes=found.total - held + ALLOWANCE_BYTES,
                available_bytes=None if available is None else available[device],
            )
        )
    return CudaPlan(subject, prepared, options, tuple(plans))


def advice_for(weights: Weights, model: Model, plan: CudaPlan) -> tuple[str, ...]:
    """Settings that would fit, each changing one thing."""
    options = plan.options
    wanted = Wanted(
        split=options.split,
        context=PAGE_LENGTH * (backend_options(model, options).pages - 1),
        cache=options.cache,
        slot_count=options.slot_count,
        ubatch=options.ubatch_tokens,
    )
    rough = plan_devices(weights, model, wanted)
    available = tuple(
        (exact.available_bytes or 0) - (exact.total_bytes - estimate.total_bytes)
        for exact, estimate in zip(plan.devices, rough, strict=True)
    )
    return advice(weights, model, replace(wanted, available=available))


def context_that_fits(plan: CudaPlan) -> int:
    """The most tokens of all sequences together that every device has room for; 0 if none."""
    pages = plan.prepared.needs.page_count
    most = pages - 1
    for one in plan.devices:
        if one.available_bytes is not None and one.cache_bytes:
            left = one.available_bytes - (one.total_bytes - one.cache_bytes)
            most = min(most, left * pages // one.cache_bytes - 1)
    return max(0, most) * PAGE_LENGTH


def check_room(weights: Weights, model: Model, plan: CudaPlan) -> None:
    """Raises BackendError, with what would fit, where a device has too little memory."""
    if plan.fits:
        return
    short = next(
        line for line, one in zip(plan.describe(), plan.devices, strict=True) if not one.fits
    )
    found = advice_for(weights, model, plan)
    remedy = f"{' or '.join(found)} would fit" if found else "take more GPUs or a smaller model"
    raise BackendError(f"{short}: does not fit; {remedy}")


def cuda_engine(
    weights: Weights,
    model: Model,
    devices: Sequence[Device],
    plan: CudaPlan,
    sampler: Sampler,
    end_tokens: frozenset[int],
    progress: Callable[[int, int], None] = lambda done, total: None,
    drafting: Callable[[CudaBackend], tuple[Drafter | None, Terms]] = lambda backend: (None, USUAL),
) -> ModelEngine:
    """Load what was planned.

    `end_tokens` end a text.  `drafting` is asked, once the backend is there, who drafts for it.
    Raises ModelError for the file, BackendError and KernelError for what the machine cannot do.
    """
    options = plan.options
    backend = CudaBackend(
        plan.subject,
        devices,
        backend_options(model, options),
        prepared=plan.prepared,
        marks_max=states_per_slot(
            state_bytes(model.dimensions),
            options.slot_count,
            options.cache_ram_bytes,
            options.states_max,
        ),
        builds=options.builds,
        progress=progress,
    )
    drafter, terms = drafting(backend)
    return ModelEngine(
        backend,
        sampler,
        slot_count=options.slot_count,
        context_length=options.context_length or model.context_length,
        batch_tokens=options.batch_tokens,
        end_tokens=end_tokens,
        reuse_generated=options.reuse_generated,
        model_digest=weights.digest(),
        page_count=options.page_count,
        snapshots=Snapshots(options.cache_ram_bytes),
        unstable=("reuse of generated tokens",) if options.reuse_generated else (),
        state_step=options.state_step,
        drafter=drafter,
        terms=terms,
    )


def backend_options(model: Model, options: CudaOptions) -> Options:
    return Options(
        region_count=options.slot_count,
        capacity=options.context_length or model.context_length,
        cache=options.cache,
        page_count=options.page_count,
        ubatch=options.ubatch_tokens,
    )


def subject_of(weights: Weights, model: Model, split: Sequence[float]) -> Subject:
    """The network, and where its weights lie: a layer's where the layer is, the rest at the end."""
    places = places_of(weights, split)

    def device_of(weight: str) -> int:
        block = BLOCK.match(weight)
        return places[-1] if block is None else places[int(block[1])]

    return Subject(
        network=model.network,
        weights=weights.tensors,
        dimensions=model.dimensions,
        device_count=len(split),
        device_of=device_of,
        first_device=places[0],
    )


def places_of(weights: Weights, split: Sequence[float]) -> tuple[int, ...]:
    """The device of each block, and of the head."""
    blocks = {int(found[1]) for name in weights.tensors if (found := BLOCK.match(name))}
    return share_out(max(blocks) + 2, split)
