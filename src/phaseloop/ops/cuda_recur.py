"""Gated delta nets: layers that recur."""

from phaseloop.kernels import delta

from .cuda_emit import Emitter
from .cuda_graph import Heads, Node, Norm, Recurred, refuse
from .cuda_program import Value


def recur(to: Emitter, node: Recurred) -> Value:
    """-> f32 [T, HV, S]; the lanes' states go on."""
    device = to.home(node)
    mixed, step, rate = (to.get_on(device, one, "f32") for one in node.inputs)
    taps, decay = (
        to.store.vector(device, name) for name in (node.spec.convolution, node.spec.decay)
    )
    matrices, histories = to.store.states(device, node.layer)
    inputs = to.inputs[device]
    lanes = delta.Lanes(inputs.firsts, inputs.counts, inputs.reads, inputs.writes)
    _, value_heads, width = node.shape
    key_heads = (mixed.shape[1] // width - value_heads) // 2
    convolved = to.program.new(device, "f32", *mixed.shape)
    to.step(
        device,
        (mixed, convolved),
        lambda at: (
            delta.convolve(
                at(mixed),
                taps,
                histories,
                at(convolved),
                lanes,
                key_heads=key_heads,
                width=width,
                count_max=to.shape.count_max,
                epsilon=node.spec.epsilon,
            ),
        ),
    )
    y = to.program.new(device, "f32", *node.shape)
    to.step(
        device,
        (convolved, step, rate, y),
        lambda at: (delta.recur(at(convolved), at(step), at(rate), decay, matrices, at(y), lanes),),
    )
    return y


def gated_norm(to: Emitter, gate: Node, normed: Norm) -> Value:
    """-> f16 [T, HV, S]."""
    (found,) = normed.inputs
    if not isinstance(found, Recurred) or not isinstance(gate, Heads):
        refuse("gated norms of anything but delta nets")
    device = to.home(found)
    x = to.get(found, "f32")
    gates = to.get_on(device, gate.inputs[0], "f32").shaped(*gate.shape)
    weight = to.store.vector(device, normed.weight)
    y = to.program.new(device, "f16", *found.shape)
    to.step(
        device,
        (x, gates, y),
        lambda at: (delta.gated_norm(at(x), at(gates), weight, at(y), epsilon=normed.epsilon),),
    )
    return y
