"""Works nodes out: values by node and type, on the device that holds what they need.

A node is worked out when the first who uses it is, and then lies there for all of them, converted
or brought to other devices at most once.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from phaseloop.kernels import activation, prefill, rows, skinny
from phaseloop.kernels.contract import Array
from phaseloop.kernels.repack import Packed

from .cuda_graph import Attended, Embedded, Linear, Mixed, Node, Norm, Recurred, Sum
from .cuda_program import Make, Program, Value
from .cuda_shape import Inputs, PassShape, Store
from .interface import Rope


class Emitter(ABC):
    """Emits the steps of one pass.  `device_of` and `first_device` as in cuda_plan.Subject."""

    def __init__(
        self,
        store: Store,
        inputs: Sequence[Inputs],
        shape: PassShape,
        device_of: Callable[[str], int],
        first_device: int,
    ) -> None:
        self.program = Program()
        self.store = store
        self.inputs = inputs
        self.shape = shape
        self.queries: dict[int, Value] = {}  # by node, of those whose keys have been written
        self.turns: dict[tuple[int, Rope], Value] = {}
        self._device_of = device_of
        self._first_device = first_device
        self._made: dict[tuple[int, str], Value] = {}
        self._here: dict[tuple[int, int, int], Value] = {}
        self._users: Mapping[int, list[Node]] = {}

    @abstractmethod
    def emit(self, node: Node) -> None:
        """Work a node out, and say so by `made`."""

    def get(self, node: Node, kind: str) -> Value:
        """A node's value on its own device, as f16 or f32."""
        if (id(node), kind) not in self._made:
            if not {(id(node), "f16"), (id(node), "f32")} & self._made.keys():
                self.emit(node)
            if (id(node), kind) not in self._made:
                self._convert(node, kind)
        return self._made[id(node), kind]

    def get_on(self, device: int, node: Node, kind: str) -> Value:
        """The same on any device."""
        value = self.get(node, kind)
        if value.storage.device == device:
            return value
        key = (id(value.storage), value.begin, device)
        if key not in self._here:
            self._here[key] = self.program.hop(value, device)
        return self._here[key].shaped(*value.shape)

    def made(self, node: Node, value: Value) -> None:
        self._made[id(node), value.kind] = value

    def users(self, node: Node) -> list[Node]:
        return self._users.get(id(node), [])

    def step(self, device: int, uses: Sequence[Value], make: Make) -> None:
        self.program.step(device, uses, make)

    def home(self, node: Node) -> int:
        """The device that works a node out."""
        match node:
            case Embedded():
                return self._first_device
            case Linear() | Norm():
                return self._device_of(node.weight)
            case Mixed():
                return self._device_of(node.spec.router)
            case Recurred():
                return self._device_of(node.spec.convolution)
            case Attended() | Sum():
                return self.home(node.inputs[1])
            case _:
                return self.home(node.inputs[0])

    def _convert(self, node: Node, kind: str) -> None:
        other = self._made[id(node), "f32" if kind == "f16" else "f16"]
        device = other.storage.device
        result = self.program.new(device, kind, *other.shape)
        convert = rows.narrow if kind == "f16" else rows.widen
        self.step(device, (other, result), lambda at: (convert(at(other), at(result)),))
        self.made(node, result)

    # --- what several nodes are made of -----------------------------------------------------------

    def product(
        self,
        device: int,
        weight: Packed,
        node: Node,
        *,
        bias: Array | None = None,
        residual: Node | None = None,
    ) -> Value:
        """A node's rows times a matrix."""
        x = self.get_on(device, node, input_kind(weight))
        x = x.shaped(x.shape[0], weight.columns)
        more = None if residual is None else self.get_on(device, residual, "f32")
        y = self.program.new(device, "f32", x.shape[0], weight.rows)
        is_skinny = self.shape.generated or weight.kind == "F32"
        multiply = skinny.skinny if is_skinny else prefill.prefill
        self.step(
            device,
            (x, y) if more is None else (x, y, more),
            lambda at: (
                multiply(
                    at(x),
                    weight,
                    at(y),
                    bias=bias,
                    residual=None if more is None else at(more),
                ),
            ),
        )
        return y

    def gate(self, device: int, gate: Value, up: Value, kind: Literal["silu", "gelu"]) -> Value:
        y = self.program.new(device, "f16", *up.shape)
        self.step(
            device, (gate, up, y), lambda at: (activation.gated(at(gate), at(up), at(y), kind),)
        )
        return y


def input_kind(weight: Packed) -> str:
    """As what activations meet a matrix."""
    return "f32" if weight.kind == "F32" else "f16"
