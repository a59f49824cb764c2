"""From a network's graph to launches: which kernels compute a node, and what they take along.

Products add biases and residuals as they are stored; norms, turns and writes to the cache of heads
are one kernel; gates go with what they gate.  A node is worked out when the first who uses it is;
so what nobody needs, as the head where no logits are wanted, is never computed.

Rows of prompts take the kernels for many rows, generated ones those for few: that a row's bits
depend on nothing else is the kernels' promise, and nothing here is chosen by how many rows there
are.
"""

from collections.abc import Sequence

from phaseloop.kernels import activation, gather, norm, rows
from phaseloop.kernels.repack import Packed

from .cuda_emit import Emitter, input_kind
from .cuda_graph import (
    Attended,
    Capped,
    Embedded,
    Flat,
    Gated,
    Linear,
    Mixed,
    Node,
    Norm,
    Recurred,
    Sum,
    Taken,
    refuse,
    users_of,
)
from .cuda_heads import attend, gate_heads, keep
from .cuda_mixture import mix, shared_gate
from .cuda_program import Value
from .cuda_recur import gated_norm, recur


class Lowering(Emitter):
    def lower(self, effects: Sequence[Attended | Recurred], logits: Node | None) -> Value | None:
        """Effects in order, then the logits, if they are wanted."""
        roots: list[Node] = [*effects]
        self._users = users_of([*roots, logits] if logits is not None else roots)
        for node in effects:
            if isinstance(node, Attended):
                keep(self, node)
            else:
                self.get(node, "f32")
        if logits is None:
            return None
        found = self.get(logits, "f32")
        self.program.keep(found)
        return found

    def emit(self, node: Node) -> None:
        match node:
            case Embedded():
                self.made(node, self._embed(node))
            case Linear():
                self.made(node, self._linear(node))
            case Norm() if len(node.shape) == 2:
                self._norm(node)
            case Sum():
                self.made(node, self._sum(node))
            case Attended():
                self.made(node, attend(self, node))
            case Recurred():
                self.made(node, recur(self, node))
            case Gated():
                self.made(node, self._gated(node))
            case Mixed():
                self.made(node, mix(self, node))
            case Capped():
                self.made(node, self._capped(node))
            case Taken():
                self.made(node, self._taken(node))
            case Flat():
                (x,) = node.inputs
                self.made(node, self.get(x, natural_kind(x)).shaped(*node.shape))
            case _:
                refuse(f"{type(node).__name__.lower()} rows by themselves")

    def _embed(self, node: Embedded) -> Value:
        device = self.home(node)
        weight = self.store.matrix(device, node.weight, 0, node.row_count)
        y = self.program.new(device, "f32", *node.shape)
        tokens = self.inputs[device].tokens
        self.step(
            device, (y,), lambda at: (gather.gather(tokens, weight, at(y), scale=node.scale),)
        )
        return y

    def _matrix(self, node: Linear) -> Packed:
        return self.store.matrix(self.home(node), node.weight, node.first, node.shape[-1])

    def _linear(self, node: Linear, residual: Node | None = None) -> Value:
        device = self.home(node)
        bias = None if node.bias is None else self.store.vector(device, node.bias)
        (x,) = node.inputs
        return self.product(device, self._matrix(node), x, bias=bias, residual=residual)

    def _norm(self, node: Norm) -> None:
        device = self.home(node)
        x = self.get_on(device, node.inputs[0], "f32")
        weight = self.store.vector(device, node.weight)
        kinds = {kind for user in self.users(node) for kind in self._wanted_by(user)}
        half, full = (
            self.program.new(device, kind, *node.shape) if kind in kinds else None
            for kind in ("f16", "f32")
        )
        made = [one for one in (half, full) if one is not None]
        self.step(
            device,
            (x, *made),
            lambda at: (
                norm.rms_norm(
                    at(x),
                    weight,
                    epsilon=node.epsilon,
                    y_half=None if half is None else at(half),
                    y_full=None if full is None else at(full),
                ),
            ),
        )
        for one in made:
            self.made(node, one)

    def _wanted_by(self, user: Node) -> tuple[str, ...]:
        """As what a user reads its rows."""
        if isinstance(user, Linear):
            return (input_kind(self._matrix(user)),)
        return ("f16", "f32") if isinstance(user, Mixed) else ("f32",)

    def _sum(self, node: Sum) -> Value:
        x, y = node.inputs
        device = self.home(node)
        shared = shared_gate(y)
        if shared is not None and isinstance(x, Sum) and isinstance(x.inputs[1], Mixed):
            more = mix(self, x.inputs[1], shared)
            x = x.inputs[0]
        elif isinstance(y, Linear) and len(self.users(y)) == 1:
            return self._linear(y, residual=x)
        else:
            more = self.get_on(device, y, "f32")
        before = self.get_on(device, x, "f32")
        result = self.program.new(device, "f32", *node.shape)
        self.step(
            device,
            (before, more, result),
            lambda at: (rows.add(at(before), at(more), at(result)),),
        )
        return result

    def _gated(self, node: Gated) -> Value:
        gate, up = node.inputs
        if node.activation == "sigmoid" and isinstance(up, Attended):
            return gate_heads(self, gate, up)
        if node.activation == "silu" and isinstance(up, Norm) and len(up.shape) == 3:
            return gated_norm(self, gate, up)
        if node.activation not in ("silu", "gelu") or len(node.shape) != 2:
            refuse(f"{node.activation} gates of this kind")
        device = self.home(node)
        g, u = (self.get_on(device, one, "f32") for one in (gate, up))
        return self.gate(device, g, u, node.activation)

    def _capped(self, node: Capped) -> Value:
        """In place: nobody else reads it."""
        (x,) = node.inputs
        if len(self.users(x)) > 1:
            refuse("soft caps of rows that are used elsewhere")
        value = self.get(x, "f32")
        device = value.storage.device
        self.step(device, (value,), lambda at: (activation.soft_cap(at(value), node.cap),))
        return value

    def _taken(self, node: Taken) -> Value:
        (x,) = node.inputs
        value = self.get(x, natural_kind(x))
        device = value.storage.device
        y = self.program.new(device, value.kind, node.shape[0], *value.shape[1:])
        wanted = self.inputs[device].wanted
        self.step(device, (value, y), lambda at: (rows.take(at(value), wanted, at(y)),))
        return y


def natural_kind(node: Node) -> str:
    """As what its kernel gives it."""
    return "f16" if isinstance(node, Attended | Gated) else "f32"
