"""Goal: the cost of a draft is what a row adds to a pass, whatever disturbs the measurement.

Method: a backend whose passes take the time that a scripted clock says.
"""

import pytest

from phaseloop.engine import draft_cost


class Slow:
    """A pass takes `fixed` plus `row` per row; every second one is disturbed."""

    def __init__(self, clock, fixed, row):
        self._clock, self._fixed, self._row = clock, fixed, row
        self.passes = []
        self.lengths = []

    def forward(self, spans):
        (span,) = spans
        assert span.generated and span.start == 0 and span.outputs == len(span.tokens)
        disturbed = 5.0 if len(self.passes) % 2 else 0.0
        self._clock[0] += self._fixed + self._row * len(span.tokens) + disturbed
        self.passes.append(len(span.tokens))

    def truncate(self, region, length):
        self.lengths.append((region, length))


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(draft_cost.time, "perf_counter", lambda: now[0])
    return now


def test_a_row_more(clock):
    backend = Slow(clock, fixed=3.0, row=1.0)
    assert draft_cost.row_cost(backend) == pytest.approx(0.25)  # 1 of 4
    assert set(backend.passes) == {1, 5}
    assert backend.lengths[-1] == (0, 0), "the region is left empty"


def test_a_row_that_costs_nothing(clock):
    assert draft_cost.row_cost(Slow(clock, fixed=3.0, row=0.0)) == 0.0


def test_a_pass_of_the_draft_model(clock):
    model, drafter = Slow(clock, 3.0, 1.0), Slow(clock, 0.5, 0.5)
    assert draft_cost.draft_cost(model, drafter) == pytest.approx(0.25)
