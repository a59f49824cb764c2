"""Goal: the engine presets say what was measured, and what they predict is a prediction.

Method: every figure is simulated and compared; then fitted inputs are moved to see what follows.
"""

import pytest
from msgspec.structs import replace

from phaseloop.engine.sim_presets import V100, V100_MTP
from phaseloop.sim.calibration import FIGURES, Figure, pair, pair_seconds

ALL = [(name, figure) for name, figures in FIGURES.items() for figure in figures]


@pytest.mark.parametrize(("name", "figure"), ALL, ids=lambda value: getattr(value, "what", value))
def test_figures(name: str, figure: Figure):
    assert figure.simulated() == pytest.approx(figure.measured, rel=figure.tolerance)


def test_the_issues_targets():
    """Total prefill of the pair within 2 %, the short prompt's times with MTP within 10 %."""
    assert pair_seconds(V100, "barrier-fair") == pytest.approx(42.58, rel=0.02)
    assert pair_seconds(V100, "barrier-serial") == pytest.approx(42.26, rel=0.02)
    mtp = pair(V100_MTP, "barrier-fair")
    assert mtp.prefill_makespan_s == pytest.approx(45.7, rel=0.1)
    assert mtp.barrier_wait_s.max == pytest.approx(29.7, rel=0.1)
    assert mtp.prefill_makespan_s - mtp.barrier_wait_s.max == pytest.approx(16.0, rel=0.1)


@pytest.mark.parametrize(
    ("policy", "plain", "stops"),
    [("barrier-fair", 20, 22), ("barrier-greedy", 20, 22), ("barrier-serial", 20, 24)],
)
def test_rounds_of_the_pair(policy, plain, stops):
    assert pair(V100, policy).prefill_rounds == plain
    assert pair(V100, policy, stops=True).prefill_rounds == stops


def test_at_least_two_figures_of_the_pair_are_predicted():
    predicted = [figure for _, figure in ALL if figure.use == "predicted" and figure.unit == "s"]
    assert len(predicted) >= 2


def test_a_worse_parameter_misses_the_figures():
    """What would a preset without the quadratic term, or without the cost of a lane, say?"""
    flat = replace(V100, cost=replace(V100.cost, prefill_pair_ps=0))
    assert pair_seconds(flat, "barrier-fair") != pytest.approx(42.58, rel=0.02)
    free = replace(V100, cost=replace(V100.cost, prefill_lane_ns=0))
    difference = pair_seconds(free, "barrier-fair") - pair_seconds(free, "barrier-serial")
    assert abs(difference) < 0.001  # where 0.326 s were measured
