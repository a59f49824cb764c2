"""Goal: what a run was like is computed right, from its steps alone.

Method: runs short enough to work out by hand, on an engine whose rounds take 1 s for a prompt round
and 0.1 s for a decode round; then what must agree with an independent count over any run.
"""

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from phaseloop.core.policy import PRESETS
from phaseloop.core.vocabulary import DeliverTokens, FinishRequest, LaunchRound, Request
from phaseloop.engine.protocol import limits_of
from phaseloop.engine.sim import Capacity, SimModel, describe
from phaseloop.engine.sim_cost import Cost
from phaseloop.engine.sim_faults import Faults, parse_failure
from phaseloop.engine.sim_presets import V100_MTP
from phaseloop.sim.arrivals import Arrival, arrivals_of
from phaseloop.sim.metrics import Collector, Summary
from phaseloop.sim.workload import read_workload
from phaseloop.sim.world import Scene, simulate

S = 1_000_000_000
MODEL = SimModel(
    "clockwork",
    Capacity(slot_count=2, batch_tokens=100, context_length=10_000, page_count=100),
    Cost(prefill_round_ns=S, decode_round_ns=S // 10),
)
WORKLOADS = Path(__file__).parents[2] / "fixtures" / "workloads"


def measured(policy: str, *arrivals: Arrival, cut_s: float | None = None, faults=None) -> Summary:
    scene = Scene(
        limits=limits_of(describe(MODEL)),
        policy=PRESETS[policy],
        model=MODEL,
        cut_ns=None if cut_s is None else int(cut_s * S),
    )
    return simulate(scene, iter(arrivals), faults=faults)


def at(seconds: float, request_id: int, prompt: int, output: int = 3, **wishes) -> Arrival:
    """A request whose text ends, without a token, after `output` tokens."""
    return Arrival(int(seconds * S), Request(request_id, prompt, **wishes), (output,))


def test_one_request():
    one = measured("barrier-fair", at(5, 0, prompt=250))
    # Three prompt rounds, the first token at once, then two tokens and the end, 0.1 s each.
    assert one.prefill_makespan_s == 3.0
    assert one.makespan_s == pytest.approx(3.3)
    assert one.ttft_s.max == 3.0
    assert (one.gap_s.p50, one.gap_s.max) == (0.1, 0.1)
    assert one.queue_wait_s.max == one.prefill_wait_s.max == one.barrier_wait_s.max == 0.0
    assert (one.rounds, one.prefill_rounds, one.decode_rounds, one.mixed_rounds) == (7, 3, 4, 0)
    assert one.prefill_tokens_per_s == pytest.approx(250 / 3)
    assert one.decode_tokens_per_s == pytest.approx(3 / 0.3)
    assert one.tokens_per_s == pytest.approx(3 / 3.3)
    assert one.decode_occupancy == 0.5
    assert (one.requests, one.finished, one.unfinished) == (1, 1, 0)


def test_a_short_prompt_waits_at_the_barrier_for_a_long_one():
    both = measured("barrier-fair", at(0, 0, prompt=100), at(0, 1, prompt=300))
    # 50 + 50, 50 + 50, 100, 100: the short one is ready after two rounds of four.
    assert both.prefill_rounds == 4
    assert (both.barrier_wait_s.p50, both.barrier_wait_s.max) == (0.0, 2.0)
    assert both.prefill_wait_s.max == 0.0
    assert both.ttft_s.p50 == both.ttft_s.max == 4.0


def test_one_after_the_other_waits_for_others_prompts():
    both = measured("barrier-serial", at(0, 0, prompt=100), at(0, 1, prompt=300))
    assert both.prefill_wait_s.max == 1.0  # the long one, while the short one is computed
    assert both.barrier_wait_s.max == 3.0  # the short one, while the long one is


def test_who_comes_after_the_seal_queues_until_the_drain():
    late = measured("barrier-fair", at(0, 0, prompt=100, output=9), at(1.05, 1, prompt=100))
    # One round, then ten rounds of 0.1 s, the last of them for the end: free at 1.9 s.
    assert late.queue_wait_s.max == pytest.approx(0.85)
    assert late.ttft_s.max == pytest.approx(1.85)


def test_continuous_batching_has_gaps_and_no_waits():
    both = measured("mixed", at(0, 0, prompt=100, output=4), at(1.05, 1, prompt=150))
    assert both.queue_wait_s.max == pytest.approx(0.0)
    assert both.mixed_rounds == 2
    assert both.gap_s.max == 1.0  # a token that rides with a prompt takes its round's time
    assert both.barrier_wait_s.max == 0.0
    # The token of a mixed round is one of a decode round, too: 1.1 + 2 and the rest in between.
    assert both.prefill_tokens == 250
    assert both.decode_tokens == 7


def test_a_wait_that_a_cut_leaves_open_counts_so_far():
    cut = measured("barrier-fair", at(0, 0, prompt=100, output=1000), at(2, 1, prompt=9), cut_s=12)
    assert (cut.unfinished, cut.finished) == (2, 0)
    assert cut.queue_wait_s.max == pytest.approx(10, abs=0.2)
    assert cut.ttft_s.max == pytest.approx(10, abs=0.2)
    assert cut.makespan_s == pytest.approx(12, abs=0.2)


def test_a_gap_that_a_cut_leaves_open_counts_so_far():
    stalled = replace(at(0, 0, prompt=100, output=1000), stall_after_tokens=5, stall_ns=100 * S)
    cut = measured("barrier-fair", stalled, at(20, 1, prompt=10), cut_s=25)
    # From its last token after 1.5 s to the last event, the end of the other request at 21.3 s.
    assert cut.gap_s.max == pytest.approx(21.3 - 1.5)


def test_a_prompt_that_a_cut_leaves_unfinished_counts_so_far():
    cut = measured("barrier-serial", at(0, 0, prompt=100), at(0, 1, prompt=9000), cut_s=20.5)
    assert cut.barrier_wait_s.max == 19.0
    assert cut.prefill_wait_s.max == 1.0


@pytest.mark.parametrize(
    ("wishes", "field"),
    [
        ({"prompt": 99_999}, "refused"),
        ({"prompt": 10, "choices": 3}, "refused"),
        ({"prompt": 500, "deadline_after_ns": 2 * S}, "expired"),
        ({"prompt": 500}, "finished"),
    ],
)
def test_ends_are_told_apart(wishes, field):
    one = measured("barrier-fair", at(0, 0, **wishes))
    ends = {name: getattr(one, name) for name in ENDS}
    assert ends == {name: int(name == field) for name in ENDS}


ENDS = ("finished", "cancelled", "expired", "refused", "failed", "unfinished")


def test_a_request_that_is_refused_at_once_has_waited_for_nothing():
    assert measured("barrier-fair", at(0, 0, prompt=99_999)).queue_wait_s.max is None


def test_who_gives_up_in_the_queue_has_waited():
    patient = at(0, 0, prompt=100, output=100)
    impatient = at(2, 1, prompt=10, queue_wait_ns_max=3 * S)
    both = measured("barrier-fair", patient, impatient)
    assert both.expired == 1
    assert both.queue_wait_s.max == 3.0


def test_a_cancelled_waiter_has_waited_at_the_barrier():
    short = replace(at(0, 0, prompt=50), cancel_after_ns=int(2.5 * S))
    both = measured("barrier-fair", short, at(0, 1, prompt=450))
    assert both.cancelled == 1
    assert both.barrier_wait_s.max == 1.5


def test_failures():
    faults = Faults((parse_failure("lane@1"),))
    both = measured("barrier-fair", at(0, 0, prompt=300), at(0, 1, prompt=300), faults=faults)
    assert (both.failed, both.finished) == (1, 1)
    assert both.prefill_tokens == 50 + 300  # of the failed request only its first round


def test_an_empty_run():
    nothing = measured("barrier-fair")
    assert (nothing.events, nothing.rounds, nothing.requests) == (0, 0, 0)
    assert nothing.makespan_s is nothing.ttft_s.max is nothing.decode_tokens_per_s is None


# --- against an independent count -----------------------------------------------------------------


@pytest.mark.parametrize("policy", PRESETS)
def test_against_an_independent_count(policy):
    """Gaps and first tokens listed one by one, their percentiles by NumPy."""
    workload = replace(read_workload(WORKLOADS / "many-short.toml"), count=300)
    scene = Scene(limits=limits_of(describe(V100_MTP)), policy=PRESETS[policy], model=V100_MTP)
    arrived, last, gaps, firsts, rounds = {}, {}, [], [], 0

    def watch(event, before, after, effects):
        nonlocal rounds
        for request in getattr(event, "requests", ()):
            arrived[request.request_id] = event.at_ns
        for effect in effects:
            rounds += isinstance(effect, LaunchRound)
            if isinstance(effect, FinishRequest):
                arrived.pop(effect.request_id, None)
            if not isinstance(effect, DeliverTokens):
                continue
            for delivery in effect.deliveries:
                request_id = delivery.request_id
                if request_id in last:
                    gaps.append(event.at_ns - last[request_id])
                else:
                    firsts.append(event.at_ns - arrived[request_id])
                last[request_id] = event.at_ns

    summary = simulate(scene, arrivals_of(workload, 3), watch=watch)
    for found, values in ((summary.gap_s, gaps), (summary.ttft_s, firsts)):
        ranks = [np.percentile(values, p, method="inverted_cdf") for p in (50, 95, 99, 100)]
        assert [found.p50, found.p95, found.p99, found.max] == [rank / S for rank in ranks]
    assert summary.rounds == rounds
    assert not arrived
    assert summary.requests == sum(getattr(summary, name) for name in ENDS)


def test_a_collector_remembers_only_who_is_alive():
    workload = read_workload(WORKLOADS / "many-short.toml")
    scene = Scene(limits=limits_of(describe(V100_MTP)), policy=PRESETS["mixed"], model=V100_MTP)
    collector = Collector(scene.limits, scene.policy)
    simulate(scene, arrivals_of(workload, 3), watch=collector.observe)
    kept = (collector._queued, collector._silent, collector._alive, collector._tracks)
    assert not any(kept)
