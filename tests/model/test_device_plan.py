"""Goal: what a model takes of each GPU is known before anything is loaded, and what would fit.

Method: a file with the geometry of Qwen3.8-27B and no weights; the figures are arithmetic over that
geometry, and those published for it: 64 KiB of keys and values per token in F16, 34 in Q8_0, and
states of 144 MiB and 5.6 MiB per sequence.
"""

from collections.abc import Callable

import pytest
from msgspec.structs import replace
from real_geometry import LAYERS, bytes_of, table, write

from phaseloop.model.device_plan import (
    ALLOWANCE_BYTES,
    DevicePlan,
    Wanted,
    advice,
    filled,
    first_fit,
    fits,
    plan_devices,
    share_out,
)
from phaseloop.model.load import load_model
from phaseloop.model.weights import open_weights

GIB, MIB, KIB = 1 << 30, 1 << 20, 1 << 10
WANTED = Wanted(
    split=(31, 31, 30, 8), context=400_000, cache="Q8_0", slot_count=4, ubatch=1024
)  # the reference's box
CARDS_16 = (16 * GIB,) * 4


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> Callable[..., tuple[DevicePlan, ...]]:
    weights = open_weights(write(tmp_path_factory.mktemp("real") / "qwen3.8-27b.gguf"))
    model = load_model(weights)

    def plan(wanted: Wanted) -> tuple[DevicePlan, ...]:
        return plan_devices(weights, model, wanted)

    plan.advice = lambda wanted: advice(weights, model, wanted)  # type: ignore[attr-defined]
    return plan


def test_layers_are_shared_out_as_llama_cpp_does():
    """Place i of n goes where i / n falls in the sums of the proportions."""
    assert share_out(4, (1, 1)) == (0, 0, 1, 1)
    assert share_out(3, (1, 0, 2)) == (0, 2, 2)
    assert share_out(5, (1,)) == (0,) * 5
    places = share_out(LAYERS + 2, WANTED.split)
    assert [places.count(device) for device in range(4)] == [21, 20, 20, 5]


def test_weights_are_where_their_layer_is(planned):
    plans = planned(WANTED)
    assert [plan.layer_count for plan in plans] == [21, 20, 20, 4]
    sizes = {name: bytes_of(*part) for name, part in table().items()}
    assert sum(plan.weights_bytes for plan in plans) == sum(sizes.values())
    ends = [f"blk.{index}." for index in range(61, 65)]
    last = sum(size for name, size in sizes.items() if name.startswith((*ends, "output")))
    assert plans[3].weights_bytes == last


def test_keys_and_values_are_those_of_the_layers_that_attend(planned):
    """16 in the trunk and the one that drafts, of 4 KiB a token in F16 and 2.125 in Q8_0."""
    attending = [5, 5, 5, 2]  # of layers 0-20, 21-40, 41-60 and 61-64
    for cache, each in (("F16", 4 * KIB), ("Q8_0", 2176)):
        plans = planned(replace(WANTED, cache=cache))
        assert [plan.cache_bytes for plan in plans] == [400_000 * each * n for n in attending]
    assert 16 * 4 == 64 and 34 * KIB == 16 * 2176, "as published"


def test_states_are_those_of_the_layers_that_recur(planned):
    each = (48 * 128 * 128 + 10_240 * 3) * 4
    assert round(48 * 48 * 128 * 128 * 4 / MIB) == 144 and round(48 * 10_240 * 12 / MIB, 1) == 5.6
    plans = planned(WANTED)
    assert [plan.states_bytes for plan in plans] == [4 * 2 * each * n for n in (16, 15, 15, 2)]


def test_scratch_is_rows_and_where_the_head_is_logits(planned):
    plans = planned(WANTED)
    rows = 2 * 4 * 1024 * 17408
    assert {plan.scratch_bytes for plan in plans[:3]} == {ALLOWANCE_BYTES + rows}
    assert plans[3].scratch_bytes == ALLOWANCE_BYTES + rows + 2 * 4 * 4 * 248_320


def test_the_reference_box_has_room(planned):
    plans = planned(replace(WANTED, available=CARDS_16))
    assert fits(plans)
    assert all("of 16 GiB" in plan.describe() for plan in plans)


def test_what_does_not_fit_is_met_with_what_does(planned):
    """On smaller cards: each piece of advice, taken alone, fits, and is the nearest of its kind."""
    small = replace(WANTED, cache="F16", available=(14 * GIB,) * 4)
    assert not fits(planned(small))
    found = dict(piece.rsplit(" ", 1) for piece in planned.advice(small))
    assert fits(planned(replace(small, cache="Q8_0"))) == ("--cache-type" in found)
    split = tuple(float(part) for part in found["--tensor-split"].split(","))
    assert fits(planned(replace(small, split=split)))
    context = int(found["-c"])
    assert fits(planned(replace(small, context=context)))
    assert not fits(planned(replace(small, context=context + 256)))


def test_where_nothing_fits_nothing_is_advised(planned):
    assert planned.advice(replace(WANTED, available=(2 * GIB,) * 4)) == ()


def test_layers_fill_devices_evenly():
    assert filled([1] * 8, [4, 4]) == [4, 4]
    assert filled([1] * 6, [8, 4]) == [4, 2]
    assert filled([3, 3, 3], [4, 4]) is None
    assert first_fit([2, 2, 1], [4, 1]) == [2, 1]
