"""Goal: requests come when and as the workload says, the same ones for the same seed.

Method: workloads built in memory; rates by counting, ramps by their expected shape.
"""

from itertools import islice, pairwise

import pytest
from msgspec.structs import replace

from phaseloop.engine.sim import Prefix
from phaseloop.sim.arrivals import arrivals_of
from phaseloop.sim.distributions import Fixed, Listed, Uniform
from phaseloop.sim.workload import (
    Arrivals,
    AtTimes,
    Bursts,
    Leaving,
    Poisson,
    Ramp,
    SharedPrefix,
    Stalling,
    Stream,
    Workload,
)

S = 1_000_000_000
PLAIN = Stream(name="plain", arrivals=Arrivals(AtTimes((0,))), prompt=Fixed(10))


def drawn(*streams: Stream, seed: int = 0, **run):
    return list(arrivals_of(Workload("test", streams, **run), seed))


def times(pattern, count: int | None = None, seed: int = 0, **bounds) -> list[float]:
    stream = replace(PLAIN, arrivals=Arrivals(pattern, count, **bounds))
    return [arrival.at_ns / S for arrival in drawn(stream, seed=seed)]


# --- when -----------------------------------------------------------------------------------------


def test_a_list_is_taken_as_it_is():
    assert times(AtTimes((0, 0, 3 * S))) == [0, 0, 3]


def test_poisson_has_its_rate_and_no_memory():
    at = times(Poisson(2.0), until_ns=2000 * S)
    assert len(at) == pytest.approx(4000, rel=0.05)
    gaps = [later - earlier for earlier, later in pairwise(at)]
    assert sum(gap > 0.5 for gap in gaps) / len(gaps) == pytest.approx(0.3679, abs=0.03)


def test_a_window_shifts_and_ends_a_stream():
    at = times(Poisson(2.0), from_ns=100 * S, until_ns=200 * S)
    assert 100 <= min(at) < 105
    assert 195 < max(at) < 200


@pytest.mark.parametrize(("first", "last"), [(0.0, 4.0), (1.0, 3.0), (4.0, 0.0)])
def test_a_ramp_has_its_rates(first, last):
    at = times(Ramp(first, last, 1000 * S), until_ns=1000 * S)
    assert len(at) == pytest.approx(2000, rel=0.07)
    early = sum(when < 500 for when in at)
    assert early == pytest.approx((first * 3 + last) / 8 * 1000, rel=0.08)


def test_a_ramp_goes_on_at_its_last_rate():
    at = times(Ramp(0.0, 4.0, 100 * S), until_ns=1100 * S)
    assert sum(when >= 100 for when in at) == pytest.approx(4000, rel=0.05)


def test_a_ramp_to_nothing_ends():
    assert len(times(Ramp(4.0, 0.0, 100 * S))) == pytest.approx(200, rel=0.2)


def test_bursts():
    at = times(Bursts(60 * S, 8, 2 * S), count=24, from_ns=10 * S)
    assert len(at) == 24
    for number, start in enumerate((10, 70, 130)):
        burst = at[8 * number : 8 * number + 8]
        assert all(start <= when <= start + 2 for when in burst)
        assert burst == sorted(burst)


def test_streams_are_merged_in_the_order_of_time():
    streams = [
        replace(PLAIN, arrivals=Arrivals(Poisson(rate), 50), priority=priority)
        for priority, rate in enumerate((1.0, 3.0))
    ]
    arrivals = drawn(*streams)
    at = [arrival.at_ns for arrival in arrivals]
    assert at == sorted(at)
    assert [arrival.request.request_id for arrival in arrivals] == list(range(100))
    assert {arrival.request.priority for arrival in arrivals} == {0, 1}


def test_the_run_bounds_all_streams():
    endless = replace(PLAIN, arrivals=Arrivals(Poisson(1.0)))
    assert len(drawn(endless, endless, count=30)) == 30
    assert all(arrival.at_ns < 20 * S for arrival in drawn(endless, endless, horizon_ns=20 * S))


# --- what -----------------------------------------------------------------------------------------

RICH = replace(
    PLAIN,
    arrivals=Arrivals(Poisson(1.0), 200),
    prompt=Uniform(10, 1000),
    output=Uniform(0, 50),
    limit=Uniform(1, 60),
    choices=2,
    prefix=SharedPrefix("system", 100, 3),
    cancel=Leaving(0.3, after_ns=Uniform(0, S)),
    stall=Stalling(0.4, Fixed(5), Uniform(1, S)),
)


def test_the_same_seed_is_the_same_requests_and_another_is_not():
    assert drawn(RICH) == drawn(RICH)
    assert drawn(RICH, seed=1) != drawn(RICH)


def test_a_request_does_not_depend_on_other_streams():
    alone = drawn(RICH)
    among = [one for one in drawn(RICH, replace(PLAIN, priority=5)) if one.request.priority == 0]
    assert [one.request.prompt_length for one in among] == [
        one.request.prompt_length for one in alone
    ]
    assert [one.outputs for one in among] == [one.outputs for one in alone]


def test_what_is_drawn_for_one_thing_says_nothing_about_another():
    arrivals = drawn(replace(RICH, arrivals=Arrivals(Poisson(1.0), 2000)))
    prompts = [one.request.prompt_length > 505 for one in arrivals]
    for others in (
        [one.cancel_after_ns is not None for one in arrivals],
        [one.outputs[0] > 25 for one in arrivals],
        [one.prefix.family == 0 for one in arrivals],
    ):
        share = sum(others) / len(others)
        among = sum(o for o, p in zip(others, prompts, strict=True) if p) / sum(prompts)
        assert among == pytest.approx(share, abs=0.05)


def test_fractions_and_choices():
    arrivals = drawn(replace(RICH, arrivals=Arrivals(Poisson(1.0), 2000)))
    cancelled = [one for one in arrivals if one.cancel_after_ns is not None]
    assert len(cancelled) / 2000 == pytest.approx(0.3, abs=0.04)
    stalled = [one for one in arrivals if one.stall_after_tokens is not None]
    assert len(stalled) / 2000 == pytest.approx(0.4, abs=0.04)
    assert all(one.stall_ns > 0 for one in stalled)
    assert all(len(one.outputs) == 2 for one in arrivals)
    assert any(first != second for first, second in (one.outputs for one in arrivals))


def test_what_the_client_states_is_in_the_request():
    stream = replace(
        PLAIN,
        kind="embedding",
        adapter=3,
        priority=-1,
        deadline_ns=9 * S,
        queue_ns_max=4 * S,
        stops_before_end=(1028, 4),
        prompt=Listed((2000, 500, 3)),
        arrivals=Arrivals(AtTimes((0, 1, 2))),
    )
    first, second, third = (one.request for one in drawn(stream))
    assert (first.kind, first.adapter, first.priority) == ("embedding", 3, -1)
    assert (first.deadline_after_ns, first.queue_wait_ns_max) == (9 * S, 4 * S)
    assert (first.stop_points, second.stop_points, third.stop_points) == ((972, 1996), (496,), ())
    assert first.output_limit is None


def test_names_of_prefixes_do_not_share_families_and_streams_may_share_a_name():
    system, other = SharedPrefix("system", 50, 3), SharedPrefix("other", 50, 2)
    streams = [
        replace(PLAIN, arrivals=Arrivals(Poisson(1.0), 60), prefix=prefix, priority=number)
        for number, prefix in enumerate((system, other, system))
    ]
    families = [set(), set(), set()]
    for one in drawn(*streams):
        families[one.request.priority].add(one.prefix.family)
    assert families == [{0, 1, 2}, {3, 4}, {0, 1, 2}]


def test_a_prefix_is_no_longer_than_its_prompt():
    stream = replace(PLAIN, prefix=SharedPrefix("system", 50, 1))
    assert drawn(stream)[0].prefix == Prefix(0, 10)


def test_endless_streams_are_drawn_one_by_one():
    endless = Workload("test", (replace(PLAIN, arrivals=Arrivals(Poisson(1.0))),))
    assert len(list(islice(arrivals_of(endless, 0), 500))) == 500
