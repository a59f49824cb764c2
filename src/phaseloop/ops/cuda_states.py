"""Recurrent states whose cells lie on devices, each layer's where the layer is."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phaseloop.kernels.contract import Array
from phaseloop.kernels.device import Device

from .cuda_store import Placed, cell_of
from .delta_states import Courses
from .interface import State


class DeviceStates(Courses):
    """The parts of a state are the layers' matrices, then their histories."""

    def __init__(
        self, devices: Sequence[Device], placed: Placed, *, region_count: int, marks_max: int
    ) -> None:
        super().__init__(region_count=region_count, marks_max=marks_max)
        layers = sorted(placed.state_planes.items(), key=lambda one: one[0][1])
        self._planes: list[tuple[Device, Array]] = [
            (devices[device], planes[which]) for which in (0, 1) for (device, _), planes in layers
        ]
        self.state_bytes = sum(plane.nbytes // plane.shape[0] for _, plane in self._planes)

    def _state(self, cell: int, position: int) -> State:
        parts: list[NDArray[np.uint8]] = []
        for device, plane in self._planes:
            content: NDArray[Any] = np.empty(plane.shape[1:], plane.dtype)
            device.download(cell_of(plane, cell), content)
            parts.append(content.reshape(-1).view(np.uint8))
        return State(position, tuple(parts))

    def _load(self, cell: int, state: State) -> None:
        for (device, plane), content in zip(self._planes, state.parts, strict=True):
            device.upload(content, cell_of(plane, cell))
