"""How much memory each GPU takes of a model whose layers are split over several.

    weights   a layer's where the layer is; the embedding on the first device, the head on the last
    cache     keys and values of the layers that attend, for the tokens of all sequences together
    states    recurrent ones of the others: per slot that of its last token and the one before;
              those kept for later prompts are in host RAM
    scratch   rows of one pass, twice; logits, where the head is; and an allowance

The split is llama.cpp's: the layers and the head, in order, are shared out in proportion.  All
sizes are bytes, contexts are tokens.
"""

import re
from collections.abc import Sequence
from itertools import accumulate

from msgspec import Struct
from msgspec.structs import replace

from phaseloop.ops.delta_states import CELLS_PER_REGION

from .plan import CONTEXT_STEP, position_bytes, size, state_bytes, widest
from .shape import Model
from .weights import Weights

# Not measured: what a CUDA context, its modules and its graphs take besides our arrays.
ALLOWANCE_BYTES = 512 << 20
BLOCK = re.compile(r"blk\.(\d+)\.")
RECURRENT = re.compile(r"blk\.(\d+)\.ssm_a$")
FIRST = ("token_embd.", "rope_freqs.")  # tensors outside layers that are wanted where they begin


class Layer(Struct, frozen=True):
    """A place in the order that is split: a layer, or the head after the last."""

    weights_bytes: int
    position_bytes: int  # of keys and values, for one token
    state_bytes: int  # for one slot


class DevicePlan(Struct, frozen=True):
    layer_count: int  # without the head
    weights_bytes: int
    cache_bytes: int
    states_bytes: int
    scratch_bytes: int
    available_bytes: int | None  # None where nobody knows

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.cache_bytes + self.states_bytes + self.scratch_bytes

    @property
    def fits(self) -> bool:
        return self.available_bytes is None or self.total_bytes <= self.available_bytes

    def describe(self) -> str:
        """One line for people."""
        states = f"states {size(self.states_bytes)}, " if self.states_bytes else ""
        known = "" if self.available_bytes is None else f" of {size(self.available_bytes)}"
        return (
            f"{self.layer_count} layers, weights {size(self.weights_bytes)}, KV cache "
            f"{size(self.cache_bytes)}, {states}scratch {size(self.scratch_bytes)}: "
            f"{size(self.total_bytes)}{known}"
        )


class Wanted(Struct, frozen=True):
    """What an operator asks for."""

    split: tuple[float, ...]  # proportions, one per device
    context: int  # of all sequences together
    cache: str  # GGML type of keys and values
    slot_count: int
    ubatch: int
    available: tuple[int, ...] | None = None  # bytes of each device; None: nobody knows


def plan_devices(weights: Weights, model: Model, wanted: Wanted) -> tuple[DevicePlan, ...]:
    layers = layers_of(weights, model, wanted.cache)
    rows = 2 * 4 * wanted.ubatch * widest(weights, model.dimensions.vocabulary)
    logits = 2 * 4 * wanted.slot_count * model.dimensions.vocabulary
    devices = range(len(wanted.split))
    places = share_out(len(layers), wanted.split)
    plans: list[DevicePlan] = []
    for device in devices:
        own = [layer for layer, place in zip(layers, places, strict=True) if place == device]
        has_head = places[-1] == device
        plans.append(
            DevicePlan(
                layer_count=len(own) - has_head,
                weights_bytes=sum(layer.weights_bytes for layer in own),
                cache_bytes=wanted.context * sum(layer.position_bytes for layer in own),
                states_bytes=wanted.slot_count
                * CELLS_PER_REGION
                * sum(layer.state_bytes for layer in own),
                scratch_bytes=ALLOWANCE_BYTES + rows + (logits if has_head else 0) if own else 0,
                available_bytes=None if wanted.available is None else wanted.available[device],
            )
        )
    return tuple(plans)


def share_out(count: int, split: Sequence[float]) -> tuple[int, ...]:
    """The device of each of `count` layers: layer i is where i / count falls in the proportions."""
    ends = list(accumulate(split))
    return tuple(
        next(device for device, end in enumerate(ends) if index * ends[-1] < end * count)
        for index in range(count)
    )


def layers_of(weights: Weights, model: Model, cache: str) -> list[Layer]:
    """The layers in order, those that only draft after them, and the head."""
    sizes: dict[int, int] = {}
    first, last = 0, 0
    for name, weight in weights.tensors.items():
        block = BLOCK.match(name)
        if block is not None:
            sizes[int(block[1])] = sizes.get(int(block[1]), 0) + weight.data.nbytes
        elif name.startswith(FIRST):
            first += weight.data.nbytes
        else:
            last += weight.data.nbytes
    recurrent = {int(found[1]) for name in weights.tensors if (found := RECURRENT.match(name))}
    dimensions = model.dimensions
    kv = position_bytes(dimensions, cache) // max(1, len(dimensions.ropes))
    state = state_bytes(dimensions) // max(1, len(recurrent))
    layers = [
        Layer(sizes[index], 0, state) if index in recurrent else Layer(sizes[index], kv, 0)
        for index in sorted(sizes)
    ]
    if "output.weight" not in weights.tensors:  # the head is the embedding, held once more there
        last += weights.tensors["token_embd.weight"].data.nbytes
    head = Layer(last, 0, 0)
    begin = layers[0]
    layers[0] = Layer(begin.weights_bytes + first, begin.position_bytes, begin.state_bytes)
    return [*layers, head]


# --- what would fit -------------------------------------------------------------------------------


def fits(plans: Sequence[DevicePlan]) -> bool:
    return all(plan.fits for plan in plans)


def advice(weights: Weights, model: Model, wanted: Wanted) -> tuple[str, ...]:
    """Settings near to what is wanted that fit, each changing one thing; empty if none does."""

    def tried(**changes: object) -> bool:
        return fits(plan_devices(weights, model, replace(wanted, **changes)))

    found: list[str] = []
    split = fitting_split(weights, model, wanted)
    if split is not None:
        found.append("--tensor-split " + ",".join(f"{part:g}" for part in split))
    if wanted.cache == "F16" and tried(cache="Q8_0"):
        found.append("--cache-type q8_0")
    context = fitting_context(weights, model, wanted)
    if context:
        found.append(f"-c {context}")
    slots = next((n for n in range(wanted.slot_count - 1, 0, -1) if tried(slot_count=n)), None)
    if slots is not None:
        found.append(f"-np {slots}")
    return tuple(found)


def fitting_context(weights: Weights, model: Model, wanted: Wanted) -> int:
    """The most tokens, in whole pages, for which every device has room; 0 if there is none."""
    assert wanted.available is not None, "asked where something does not fit"
    layers = layers_of(weights, model, wanted.cache)
    places = share_out(len(layers), wanted.split)
    most = wanted.context
    for device, plan in enumerate(plan_devices(weights, model, wanted)):
        each = sum(
            layer.position_bytes
            for layer, place in zip(layers, places, strict=True)
            if place == device
        )
        left = wanted.available[device] - (plan.total_bytes - plan.cache_bytes)
        if left < 0:
            return 0
        most = min(most, left // each if each else most)
    return most // CONTEXT_STEP * CONTEXT_STEP


def fitting_split(weights: Weights, model: Model, wanted: Wanted) -> tuple[float, ...] | None:
    """Numbers of layers per device that fit: each filled as far as all are, if any do."""
    assert wanted.available is not None, "asked where something does not fit"
    layers = layers_of(weights, model, wanted.cache)
    empty = plan_devices(weights, model, replace(wanted, context=0))
    scratch = max(plan.scratch_bytes for plan in empty)
    costs = [
        layer.weights_bytes
        + wanted.context * layer.position_bytes
        + wanted.slot_count * CELLS_PER_REGION * layer.state_bytes
        for layer in layers
    ]
    rooms = [available - scratch for available in wanted.available]
    if sum(costs) > sum(max(0, room) for room in rooms):
        return None
    counts = filled(costs, rooms)
    if counts is None:
        return None
    split = tuple(float(count) for count in counts)
    return split if fits(plan_devices(weights, model, replace(wanted, split=split))) else None


def filled(costs: Sequence[int], rooms: Sequence[int]) -> list[int] | None:
    """How many of the costs in order each room takes, at the lowest fill that takes them all."""
    low, high = 0, 1 << 10
    best: list[int] | None = None
    while low < high:  # shares of a room, in 1/1024
        share = (low + high) // 2
        counts = first_fit(costs, [room * share // 1024 for room in rooms])
        if counts is None:
            low = share + 1
        else:
            best, high = counts, share
    return best or first_fit(costs, list(rooms))


def first_fit(costs: Sequence[int], rooms: Sequence[int]) -> list[int] | None:
    counts, index = [0] * len(rooms), 0
    for device, room in enumerate(rooms):
        left = room
        while index < len(costs) and costs[index] <= left:
            left -= costs[index]
            counts[device] += 1
            index += 1
    return counts if index == len(costs) else None
