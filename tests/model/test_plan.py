"""Goal: the plan of memory counts what is there, and says what would fit.

Method: arithmetic by hand on tiny models, and made-up files in the place of the kernel's.
"""

from pathlib import Path

import pytest
from synthetic import HEAD_WIDTH, HIDDEN, KV_HEADS, LAYERS, VOCABULARY, decoder_file

from phaseloop.model.load import load_model
from phaseloop.model.plan import (
    PROCESS_BYTES,
    Plan,
    available_memory,
    copies_bytes,
    plan_memory,
    position_bytes,
    size,
    with_drafter,
)
from phaseloop.model.weights import open_weights

MIB = 1 << 20


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return open_weights(decoder_file("llama").write(tmp_path_factory.mktemp("plan") / "tiny.gguf"))


def plan(weights, context: int, available: int | None = None, cache: str = "F16") -> Plan:
    return plan_memory(
        weights,
        load_model(weights),
        context=context,
        cache=cache,
        slot_count=4,
        ubatch=512,
        available_bytes=available,
    )


def test_the_parts_are_what_arithmetic_says(weights):
    found = plan(weights, 1024)
    values = LAYERS * KV_HEADS * HEAD_WIDTH * 2  # keys and values
    assert found.position_bytes == 2 * values
    assert found.cache_bytes == 1024 * 2 * values
    assert found.sequence == 512  # what it was trained for
    assert found.weights_bytes == sum(w.data.nbytes for w in weights.tensors.values())
    logits, rows, masks = 2 * 4 * 4 * VOCABULARY, 2 * 4 * 512 * HIDDEN, 4 * 512 * 512
    assert found.scratch_bytes == PROCESS_BYTES + logits + rows + masks


def test_drafts_have_rows_of_logits_and_their_model_its_own_parts(weights):
    model = load_model(weights)
    sizes = {"context": 1024, "cache": "F16", "slot_count": 4, "ubatch": 512}
    alone = plan_memory(weights, model, **sizes, available_bytes=None)
    drafting = plan_memory(weights, model, **sizes, available_bytes=None, draft_tokens=5)
    assert drafting.scratch_bytes - alone.scratch_bytes == 2 * 4 * 4 * 5 * VOCABULARY
    both = with_drafter(drafting, alone)
    assert both.position_bytes == 2 * alone.position_bytes
    assert both.drafter_bytes == alone.weights_bytes + alone.scratch_bytes - PROCESS_BYTES
    assert both.total_bytes == drafting.total_bytes + alone.total_bytes - PROCESS_BYTES
    assert f"draft model {size(both.drafter_bytes)}" in both.describe()


@pytest.mark.parametrize(
    ("kind", "block_bytes"), [("Q4_0", 18), ("Q4_1", 18 + 4), ("Q4_K", 144), ("Q8_0", 0)]
)
def test_copies_are_of_types_that_are_repacked(kind, block_bytes, tmp_path):
    """Of 32 weights, 256 for Q4_K; a Q4_1 becomes a Q4_0 and an F32 offset."""
    weights = open_weights(decoder_file("llama", kind).write(tmp_path / "tiny.gguf"))
    matrices = [one for one in weights.tensors.values() if one.kind == kind]
    values = sum(one.shape[0] * one.shape[1] for one in matrices)
    block = 256 if kind == "Q4_K" else 32
    assert matrices
    assert copies_bytes(weights) == values // block * block_bytes


def test_a_q8_cache_has_34_bytes_for_32_values(weights):
    dimensions = load_model(weights).dimensions
    assert position_bytes(dimensions, "Q8_0") * 32 == position_bytes(dimensions, "F16") // 2 * 34


@pytest.mark.parametrize("spare, tokens", [(-1, 0), (0, 1024), (255, 1024), (256, 1280)])
def test_the_context_that_fits_is_whole_pages(weights, spare, tokens):
    exact = plan(weights, 1024)
    available = exact.total_bytes + spare * exact.position_bytes
    found = plan(weights, 1024, available)
    assert found.fits == (spare >= 0)
    assert found.context_that_fits() == (tokens or 768)


def test_nothing_fits_where_the_weights_do_not(weights):
    found = plan(weights, 1024, available=MIB)
    assert not found.fits
    assert found.context_that_fits() == 0


def test_a_machine_that_does_not_say_is_trusted(weights):
    assert plan(weights, 1 << 20).fits
    assert "available" not in plan(weights, 1024).describe()
    assert "of 1 GiB available" in plan(weights, 1024, 1 << 30).describe()


# --- what there is --------------------------------------------------------------------------------


@pytest.fixture
def kernel(tmp_path) -> tuple[Path, Path]:
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    proc.mkdir()
    cgroup.mkdir()
    (proc / "meminfo").write_text("MemTotal: 4096 kB\nMemAvailable:    2048 kB\n")
    return proc, cgroup


def test_the_machine_is_asked(kernel):
    assert available_memory(*kernel) == 2 * MIB


def test_a_control_group_may_leave_less(kernel):
    _, cgroup = kernel
    (cgroup / "memory.max").write_text("1048576\n")
    (cgroup / "memory.current").write_text("600000\n")
    (cgroup / "memory.stat").write_text("anon 1\ninactive_file 100000\nactive_file 5\n")
    assert available_memory(*kernel) == 1_048_576 - 600_000 + 100_000


def test_a_control_group_without_a_limit_leaves_everything(kernel):
    _, cgroup = kernel
    (cgroup / "memory.max").write_text("max\n")
    (cgroup / "memory.current").write_text("600000\n")
    assert available_memory(*kernel) == 2 * MIB


def test_nobody_may_know(tmp_path):
    assert available_memory(tmp_path / "none", tmp_path / "none") is None


@pytest.mark.parametrize(
    "count, text",
    [(0, "0 B"), (999, "999 B"), (1536, "1.5 KiB"), (92 * MIB, "92 MiB"), (193 << 30, "193 GiB")],
)
def test_sizes_as_people_read_them(count, text):
    assert size(count) == text
