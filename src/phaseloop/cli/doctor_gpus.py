"""What CuPy can do with the GPUs, as JSON: a process of its own, which may die or hang of a driver.

Usage: python -m phaseloop.cli.doctor_gpus PEERS, where PEERS is `all`, `none`, or pairs: 0:1,2:3.
"""

import sys

import msgspec
import numpy as np

from phaseloop.kernels.contract import KernelError
from phaseloop.kernels.cupy_device import Cupy, CupyDevice, device_count, load_cupy
from phaseloop.kernels.norm import rms_norm
from phaseloop.kernels.peers import connect, parse_peer_access

from .doctor_facts import Gpus, Tried

SHAPE = (2, 256)


def examined(cupy: Cupy, peers: str) -> Gpus:
    """Raises KernelError where nothing at all can be tried."""
    access = parse_peer_access(peers)
    devices: list[CupyDevice] = []
    tried: list[Tried] = []
    for index in range(device_count(cupy)):
        name = f"device {index}"
        try:
            device = CupyDevice(cupy, index)
            name = device.name
            check_kernel(device)
        except KernelError as error:
            tried.append(Tried(index, name, str(error)))
        else:
            tried.append(Tried(index, name, None))
            devices.append(device)
    number = cupy.cuda.runtime.runtimeGetVersion()
    return Gpus(
        cupy.__version__,
        f"{number // 1000}.{number % 1000 // 10}",
        tuple(tried),
        tuple(connect(cupy, devices, access)),
    )


def check_kernel(device: CupyDevice) -> None:
    """Compiled, loaded, run, and compared: rows of a constant have a norm that is known."""
    x, weight, y = (device.allocate(shape, np.float32) for shape in (SHAPE, SHAPE[1:], SHAPE))
    device.upload(np.full(SHAPE, 3, np.float32), x)
    device.upload(np.arange(SHAPE[1], dtype=np.float32), weight)
    device.run(rms_norm(x, weight, epsilon=0.0, y_full=y))
    found = np.empty(SHAPE, np.float32)
    device.download(y, found)
    if not np.allclose(found, np.arange(SHAPE[1]), rtol=1e-5):
        raise KernelError(f"{device.name}: a kernel computed something else than it should")


def main() -> int:
    try:
        found = examined(load_cupy(), sys.argv[1])
    except KernelError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.buffer.write(msgspec.json.encode(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
