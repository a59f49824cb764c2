"""Goal: values that live at once share no bytes, any pass fits the arenas that a few were tried
for, and pages are neither lost nor written where others read.

Method: random passes and random histories of regions, from fixed seeds, against plain recounting.
"""

from itertools import combinations

import numpy as np
import pytest

pytest.importorskip("gguf")
pytest.importorskip("ggml")

from cuda_models import FAMILIES, opened

from phaseloop.engine.cuda_load import subject_of
from phaseloop.kernels.contract import Planned
from phaseloop.kernels.kv import PAGE
from phaseloop.ops.cuda_limits import input_words_max
from phaseloop.ops.cuda_pages import Pages, pages_for
from phaseloop.ops.cuda_plan import inputs_in, layout_of, program_of, trial
from phaseloop.ops.cuda_prepare import Options, prepare
from phaseloop.ops.cuda_shape import PassShape, table_width
from phaseloop.ops.interface import BackendError

OPTIONS = Options(region_count=6, capacity=9000, ubatch=96)


@pytest.fixture(scope="module", params=["gemma3", "qwen35moe"])
def subject(request, tmp_path_factory):
    tiny = opened(FAMILIES[request.param]("Q8_0"), tmp_path_factory.mktemp("model"))
    return subject_of(tiny.weights, tiny.model, (1.0, 1.0))


def passes(random, limits, count):
    """Any that a backend may make of a round."""
    for _ in range(count):
        generated = bool(random.integers(2))
        pages = int(random.integers(1, limits.pages_max + 1))
        most = limits.rows_max(pages) if generated else limits.ubatch
        rows = int(random.integers(1, most + 1))
        lanes = int(random.integers(1, min(limits.lanes_max, rows) + 1))
        cuts = sorted(random.choice(np.arange(1, rows), lanes - 1, replace=False).tolist())
        sizes = np.diff([0, *cuts, rows]).tolist()
        wanted = int(random.integers(0, min(rows, limits.outputs_max) + 1))
        yield PassShape(
            generated,
            tuple((1, size) for size in sorted(sizes)),
            None if wanted == rows else wanted,
            table_width(pages, limits.pages_max),
        )


def test_every_pass_fits_what_was_allocated(subject):
    ready = prepare(subject, OPTIONS)
    for shape in passes(np.random.default_rng(1), ready.limits, 40):
        sizes = trial(subject, ready.needs, shape).sizes
        assert all(size <= most for size, most in zip(sizes, ready.arenas, strict=True)), shape
        assert layout_of(shape).size <= input_words_max(ready.limits)


def test_values_that_live_at_once_share_no_bytes(subject):
    ready = prepare(subject, OPTIONS)
    for shape in passes(np.random.default_rng(2), ready.limits, 3):
        inputs = [inputs_in(Planned((0,), np.dtype(np.uint8)), layout_of(shape))] * 2
        program, _ = program_of(subject, ready.needs, inputs, shape)
        sizes = program.place(2)
        assert sum(one.size for one in program.storages) > 2 * sum(sizes), "bytes are shared"
        for one, other in combinations(program.storages, 2):
            if one.device == other.device and one.first <= other.last and other.first <= one.last:
                ends = one.offset + one.size, other.offset + other.size
                assert ends[0] <= other.offset or ends[1] <= one.offset


def test_pages_are_recounted_after_any_history():
    random, regions, count = np.random.default_rng(3), 5, 12
    pages, lengths = Pages(count, regions), [0] * regions
    refused = 0
    for _ in range(3000):
        region, other = random.choice(regions, 2, replace=False).tolist()
        what = random.integers(3)
        try:
            if what == 0:
                start, end = lengths[region], lengths[region] + int(random.integers(1, 700))
                copies = pages.extend(region, start, end)
                lengths[region] = end
                written = pages.table(region)[start // PAGE :]
                for reader in range(regions):
                    assert reader == region or not set(written) & set(pages.table(reader))
                assert all(copy.target in written for copy in copies)
            elif what == 1:
                lengths[region] = int(random.integers(0, lengths[region] + 1))
                pages.truncate(region, lengths[region])
            elif not lengths[other]:
                length = int(random.integers(0, lengths[region] + 1))
                pages.share(region, other, length)
                lengths[other] = length
        except BackendError:
            refused += 1
        held = [pages.table(region) for region in range(regions)]
        assert [len(table) for table in held] == [pages_for(length) for length in lengths]
        assert len(set().union(*held)) + pages.free_count == count
    assert refused > 100
