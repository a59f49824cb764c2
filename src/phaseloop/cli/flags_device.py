"""Flags of `phaseloop serve` that say what computes."""

import math

from .flags import Group, Kind, one_of, own, text, used

DEVICES_MAX = 64
DEVICES = ("cpu", "cuda", "cuda-host")


def proportions(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or len(found) > DEVICES_MAX or not 0 < sum(found) < math.inf or min(found) < 0:
        raise ValueError(f"wanted are up to {DEVICES_MAX} proportions, as in 3,1")
    return found


DEVICE = Group(
    "device",
    (
        used(
            "-dev --device",
            one_of(*DEVICES, "none", metavar="NAME"),
            "device",
            "cpu (or none), cuda: GPUs compute, cuda-host: their kernels run on the CPU, slowly, "
            "to try them",
            env="LLAMA_ARG_DEVICE",
        ),
        used(
            "-ts --tensor-split",
            Kind("N,N,..", proportions),
            "tensor_split",
            "GPUs share the layers in these proportions; without it, in those of free memory",
            env="LLAMA_ARG_TENSOR_SPLIT",
        ),
        own(
            "peer-access",
            text("PAIRS"),
            "GPUs that may copy from each other if a trial goes well: 0:1,2:3, all or none (none)",
        ),
    ),
)
