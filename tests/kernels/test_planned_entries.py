"""Goal: whatever a plan of attention, of a small operation or of a mixture may launch is compiled.

Method: the entries that each family lists against cuda/budgets.toml, which the compile gate builds,
and the dynamic shared memory that launches ask for against what the budgets allow them.
"""

import pytest

from phaseloop.kernels import (
    activation,
    attention_decode,
    attention_prefill,
    cells,
    delta,
    experts,
    lora,
    moe,
    norm,
    prefill,
    rope,
    rows,
    sample,
    skinny,
    slab,
)
from phaseloop.kernels.budgets import read_budgets
from phaseloop.kernels.kv import TYPES, WIDTHS

BUDGETS = {(budget.source, budget.entry): budget for budget in read_budgets()}
PLANNED = {
    "norm": norm.entries(),
    "activation": activation.entries(),
    "rope": rope.entries(),
    "rows": rows.entries(),
    "cells": cells.entries(),
    "sample": sample.entries(),
    "moe": moe.entries(),
    "lora": lora.entries(),
    "delta": [entry for width in delta.WIDTHS for entry in delta.entries(width)],
    "slab": [entry for kind in skinny.KINDS for entry in slab.entries(kind)],
    "prefill": [entry for kind in skinny.KINDS for entry in prefill.entries(kind)],
    "experts": [entry for kind in skinny.KINDS for entry in experts.entries(kind)],
    "attention_decode": [
        entry
        for kind in TYPES
        for width in WIDTHS
        for entry in attention_decode.entries(kind, width)
    ],
    "attention_prefill": [entry for width in WIDTHS for entry in attention_prefill.entries(width)],
}


@pytest.mark.parametrize("source", PLANNED)
def test_every_planned_entry_has_a_budget_and_no_other_has(source):
    assert set(PLANNED[source]) == {entry for name, entry in BUDGETS if name == source}


def test_prefills_shared_memory_is_within_what_is_budgeted():
    for width in WIDTHS:
        (entry,) = attention_prefill.entries(width)
        asked = attention_prefill.shared_bytes(width)
        assert asked <= BUDGETS["attention_prefill", entry].dynamic_shared_bytes
