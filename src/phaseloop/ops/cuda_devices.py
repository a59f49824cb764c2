"""The devices that the CUDA backend computes on: GPUs through CuPy, or the shim on the host."""

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from phaseloop.kernels.contract import KernelError
from phaseloop.kernels.cupy_device import CupyDevice, device_count, load_cupy
from phaseloop.kernels.device import Device, HostDevice
from phaseloop.kernels.kv import Kind
from phaseloop.kernels.peers import connect, parse_peer_access

from .interface import BackendError

CacheType: TypeAlias = Kind
Where: TypeAlias = Literal["cuda", "cuda-host"]
Warn: TypeAlias = Callable[[str], None]
TO_CPU = "--device cpu computes without a GPU"


def open_devices(
    where: Where, count: int | None, peer_access: str = "none", warn: Warn = lambda text: None
) -> list[Device]:
    """The first `count` devices, or all; of the host's shim there are as many as are wanted.

    `peer_access`: which GPUs may copy from each other, as kernels/peers.py reads it; what is
    allowed and cannot be used is told to `warn`.  Raises BackendError with the remedy where there
    is no CuPy or no GPU.
    """
    if where == "cuda-host":
        return [HostDevice(index) for index in range(count or 1)]
    try:
        return [*open_gpus(count, peer_access, warn)]
    except KernelError as error:
        raise BackendError(f"--device cuda: {error}; {TO_CPU}") from error


def open_gpus(count: int | None, peer_access: str, warn: Warn) -> Sequence[CupyDevice]:
    access = parse_peer_access(peer_access)
    cupy = load_cupy()
    there = device_count(cupy)
    wanted = there if count is None else count
    if not 0 < wanted <= there:
        raise KernelError(f"{wanted} GPUs are wanted, {there} are there")
    devices = [CupyDevice(cupy, index) for index in range(wanted)]
    for pair in connect(cupy, devices, access):
        if pair.state in ("corrupt", "failed", "impossible") and access.allows(
            pair.source, pair.target
        ):
            warn(f"GPU {pair.source} to GPU {pair.target}: {pair.why}; copies go through the host")
    return devices


def close_all(devices: Sequence[Device]) -> None:
    for device in devices:
        device.close()
