"""From settings to a model on GPUs, or on the shim that runs their kernels; imported late."""

from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from phaseloop.engine.cuda_load import (
    PAGE_LENGTH,
    CudaOptions,
    CudaPlan,
    check_room,
    context_that_fits,
    cuda_engine,
    plan_cuda,
)
from phaseloop.engine.draft import Drafter
from phaseloop.engine.draft_cost import row_cost
from phaseloop.engine.draft_ngram import NgramDrafter, Ngrams
from phaseloop.engine.protocol import limits_of
from phaseloop.engine.sampling import ChainSampler
from phaseloop.engine.slot_file import Directory
from phaseloop.engine.snapshots import budget_bytes
from phaseloop.engine.speculate import Terms
from phaseloop.kernels.contract import KernelError
from phaseloop.kernels.device import Device
from phaseloop.model.shape import Model
from phaseloop.model.weights import Weights
from phaseloop.ops.cuda_devices import Where, close_all, open_devices
from phaseloop.ops.interface import Backend, BackendError

from .serve_file import CONTEXT_MIN, cache_kind, facts_of, load_by, opened
from .serve_loaded import Loaded, Reporter
from .serve_progress import CheckProgress
from .serve_settings import ROUND_MS_GPU, SLOTS_AUTO, Settings


def load(settings: Settings, reporter: Reporter) -> Loaded:
    """Raises UserError, Interrupted."""
    return load_by(load_file, settings, reporter)


def load_file(path: Path, settings: Settings, reporter: Reporter) -> Loaded:
    instead = "which GPUs do not run yet; use --device cpu"
    weights, model, vocabulary = opened(path, settings, reporter, instead=instead)
    where: Where = "cuda-host" if settings.device == "cuda-host" else "cuda"
    devices = open_devices(
        where,
        len(settings.tensor_split) or None,
        settings.peer_access,
        lambda text: reporter.warn("peers", why=text),
    )
    try:
        plan = planned(weights, model, settings, devices, reporter)
        with CheckProgress(weights.size_bytes, reporter) as progress:
            weights.check_values(progress.at)
        reporter.check()
        engine = cuda_engine(
            weights,
            model,
            devices,
            plan,
            ChainSampler(),
            frozenset(vocabulary.end_ids),
            drafting=lambda backend: drafter_of(settings, plan.options, backend, reporter),
        )
    except KernelError as error:
        close_all(devices)
        raise BackendError(str(error)) from error
    except BaseException:
        close_all(devices)
        raise
    saved = settings.slot_save_path
    return Loaded(
        engine,
        vocabulary,
        facts_of(path, weights, model),
        ROUND_MS_GPU,
        engine.snapshots,
        limits_of(engine.describe()),
        engine.positions,
        None if saved is None else Directory(Path(saved), engine.origin),
    )


def planned(
    weights: Weights,
    model: Model,
    settings: Settings,
    devices: Sequence[Device],
    reporter: Reporter,
) -> CudaPlan:
    """A context that fits: the stated one, or as much of the trained one as does."""
    free = [device.memory_bytes()[1] for device in devices]
    wanted = settings.context or model.context_length
    options = CudaOptions(
        slot_count=settings.slot_count or SLOTS_AUTO,
        context_length=min(wanted, model.context_length),
        batch_tokens=settings.batch,
        ubatch_tokens=min(settings.ubatch, settings.batch),
        cache=cache_kind(settings, reporter),
        split=settings.tensor_split or tuple(map(float, free)),
        reuse_generated=settings.reuse_generated,
        cache_ram_bytes=budget_bytes(settings.cache_ram),
        page_count=-(-wanted // PAGE_LENGTH),
        builds=devices[0].architecture != "host",
    )
    plan = plan_cuda(weights, model, options, free)
    if not plan.fits and not settings.context:
        fitting = context_that_fits(plan)
        if fitting >= CONTEXT_MIN:
            why = "no more fits into the GPUs' memory"
            reporter.warn("context", tokens=fitting, trained=wanted, why=why)
            sequence = min(fitting, model.context_length)
            options = replace(options, context_length=sequence, page_count=fitting // PAGE_LENGTH)
            plan = plan_cuda(weights, model, options, free)
    for device, line in zip(devices, plan.describe(), strict=True):
        reporter.say("memory", device=device.name, plan=line)
    check_room(weights, model, plan)
    return plan


def drafter_of(
    settings: Settings, options: CudaOptions, backend: Backend, reporter: Reporter
) -> tuple[Drafter | None, Terms]:
    """Earlier tokens draft, if they are wanted; models that draft have no place here yet."""
    if not settings.drafters:
        return None, Terms()
    ngrams = Ngrams(settings.ngram_size_n, settings.ngram_size_m, settings.ngram_min_hits)
    drafter = NgramDrafter(ngrams, options.slot_count)
    cost = row_cost(backend) if settings.draft_cost is None else settings.draft_cost
    reporter.say("drafts", by=drafter.name, most=drafter.most, cost=round(cost, 3))
    return drafter, Terms(settings.draft_n_min, settings.draft_p_min, cost)
