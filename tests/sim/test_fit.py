"""Goal: the parameters of an engine are found from the rounds of its trace, or said not to be.

Method: traces of engines whose parameters are known, with and without noise.
"""

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import asdict, replace

from phaseloop.core.policy import PRESETS
from phaseloop.core.vocabulary import Request
from phaseloop.engine.protocol import limits_of
from phaseloop.engine.sim import SimModel, describe
from phaseloop.engine.sim_presets import SMOLLM, V100, V100_MTP
from phaseloop.runtime.trace import TraceError
from phaseloop.sim.arrivals import Arrival, arrivals_of
from phaseloop.sim.fit import FitError, fit_trace, nonnegative_least_squares
from phaseloop.sim.workload import read_workload
from phaseloop.sim.world import Scene, simulate

WORKLOADS = Path(__file__).parents[2] / "fixtures" / "workloads"


def traced(path: Path, model: SimModel, policy: str, arrivals) -> Path:
    scene = Scene(limits=limits_of(describe(model)), policy=PRESETS[policy], model=model)
    with path.open("wb") as out:
        simulate(scene, iter(arrivals), trace=out)
    return path


def agents(seed: int = 5):
    return arrivals_of(read_workload(WORKLOADS / "agents-shared-prefix.toml"), seed)


def short(seed: int = 5):
    workload = replace(read_workload(WORKLOADS / "many-short.toml"), count=250)
    return arrivals_of(workload, seed)


@pytest.mark.parametrize("policy", ["barrier-fair", "mixed"])
@pytest.mark.parametrize("model", [V100, SMOLLM], ids=lambda model: model.name)
def test_what_made_the_trace_is_found(model, policy, tmp_path):
    found = fit_trace(traced(tmp_path / "t.jsonl", model, policy, short()), "fitted")
    truth = asdict(model.cost)
    assert found.indistinct == ()
    for name, value in asdict(found.model.cost).items():
        if name in found.unseen:
            assert value == 0
        else:
            assert value == pytest.approx(truth[name], rel=1e-4), name
    assert all(one.worst < 1e-4 for one in found.residuals)


def test_copies_and_acceptance_are_found_too(tmp_path):
    model = replace(V100_MTP, cost=replace(V100_MTP.cost, prefill_hook_ppm=0))
    found = fit_trace(traced(tmp_path / "t.jsonl", model, "barrier-fair", agents()), "fitted")
    assert found.model.cost.copy_token_ps == pytest.approx(2_000_000, rel=1e-3)
    assert found.model.capacity.accept_ppm == pytest.approx(735_300, rel=0.02)
    assert found.model.capacity.draft_tokens == 3
    assert "move_token_ps" in found.unseen


def test_the_hook_becomes_a_part_of_the_prompt_costs(tmp_path):
    found = fit_trace(traced(tmp_path / "t.jsonl", V100_MTP, "barrier-fair", short()), "fitted")
    assert found.model.cost.prefill_token_ns == pytest.approx(812_000 * 1.0736, rel=1e-3)
    assert found.model.cost.prefill_hook_ppm == 0


def test_noise_moves_the_parameters_a_little_and_shows_in_the_residuals(tmp_path):
    noisy = replace(V100, cost=replace(V100.cost, jitter_ppm=50_000))
    found = fit_trace(traced(tmp_path / "t.jsonl", noisy, "barrier-fair", short()), "fitted")
    cost = found.model.cost
    assert cost.prefill_token_ns == pytest.approx(812_000, rel=0.02)
    assert cost.decode_round_ns == pytest.approx(37_668_000, rel=0.02)
    decode = next(one for one in found.residuals if one.kind == "decode")
    assert decode.rms == pytest.approx(0.05 / 3**0.5, rel=0.1)  # of a uniform error
    assert decode.worst < 0.06


def test_what_cannot_be_told_apart_is_named(tmp_path):
    """Every round of the pair has 2,048 tokens, so a cost per round is one per token."""
    pair = [Arrival(0, Request(n, 2048 * 4**n, output_limit=8), (None,)) for n in range(2)]
    found = fit_trace(traced(tmp_path / "t.jsonl", V100, "barrier-fair", pair), "fitted")
    assert {"prefill_round_ns", "prefill_token_ns"} <= set(found.indistinct)
    assert all(value >= 0 for value in asdict(found.model.cost).values())
    assert all(one.worst < 1e-3 for one in found.residuals)


def test_a_run_without_rounds_has_nothing_to_fit(tmp_path):
    with pytest.raises(FitError, match="no completed round"):
        fit_trace(traced(tmp_path / "t.jsonl", V100, "barrier-fair", []), "fitted")


def test_what_is_no_trace_is_refused():
    with pytest.raises(TraceError, match="line 1"):
        fit_trace(WORKLOADS / "pair.toml", "fitted")


@pytest.mark.parametrize("seed", range(20))
def test_least_squares_without_negative_parameters(seed):
    """Against the conditions that a minimum has: no slope where free, none downwards at 0."""
    draw = np.random.default_rng(seed)
    equations = draw.normal(size=(40, 6))
    values = equations @ draw.normal(size=6)
    gram, target = equations.T @ equations, equations.T @ values
    x = nonnegative_least_squares(gram, target)
    slope = gram @ x - target
    scale = np.abs(target).max()
    assert (x >= 0).all()
    assert np.allclose(slope[x > 0], 0, atol=1e-8 * scale)
    assert (slope[x == 0] >= -1e-8 * scale).all()
