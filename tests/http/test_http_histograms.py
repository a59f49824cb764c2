"""Goal: the distributions of waits and works are those of the requests that were answered.

Method: known durations into known buckets, read back by Prometheus's parser; then whole requests.
"""

import pytest
from http_world import TextEngine, World, world
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from phaseloop.http.histograms import Durations, Histogram
from phaseloop.http.served import HttpOptions
from phaseloop.runtime.timing import Timing

MS = 1_000_000
MEASURED = HttpOptions(metrics=True)


class Listed(Collector):
    def __init__(self, families):
        self._families = families

    def collect(self):
        return self._families


def samples(families) -> dict[str, float]:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Listed(list(families)))
    return parsed(generate_latest(registry).decode())


def parsed(text: str) -> dict[str, float]:
    return {
        " ".join([sample.name, *sample.labels.values()]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_duration_falls_into_the_bucket_that_ends_at_or_above_it():
    histogram = Histogram()
    for seconds in (0.0, 0.001, 0.0011, 0.7, 1.0, 1e6):
        histogram.observe(seconds)
    found = samples([histogram.family("x", "Some.")])
    assert found["x_bucket 0.001"] == 2
    assert found["x_bucket 0.0025"] == found["x_bucket 0.5"] == 3
    assert found["x_bucket 1.0"] == found["x_bucket 1000.0"] == 5
    assert found["x_bucket +Inf"] == found["x_count"] == 6
    assert found["x_sum"] == pytest.approx(1e6 + 1.7021)


class Ended:
    """A stream as it is left behind."""

    def __init__(self, outcome: str | None, **moments_ms: int) -> None:
        self.outcome = outcome
        self.timing = Timing()
        for name, moment_ms in moments_ms.items():
            setattr(self.timing, f"{name}_ns", moment_ms * MS)


WHOLE = {"arrived": 1000, "seated": 1003, "ready": 1043, "opened": 1743, "first": 1753}


def test_each_span_has_its_distribution():
    durations = Durations()
    durations.observe(Ended("stop", **WHOLE, ended=5743))
    found = samples(durations.families())
    sums = {
        name.split(":")[1]: value for name, value in found.items() if name.endswith("_seconds_sum")
    }
    assert sums == pytest.approx(
        {
            "queue_seconds_sum": 0.003,
            "prefill_seconds_sum": 0.040,
            "barrier_seconds_sum": 0.700,
            "decode_seconds_sum": 4.0,
            "first_token_seconds_sum": 0.753,
            "request_seconds_sum": 4.743,
        }
    )


@pytest.mark.parametrize("outcome", ["cancelled", "queue_full", "failed", "engine_lost", None])
def test_who_was_not_answered_is_not_counted(outcome):
    durations = Durations()
    durations.observe(Ended(outcome, **WHOLE, ended=5743))
    assert samples(durations.families())["phaseloop:request_seconds_count"] == 0


def test_who_only_filled_a_cache_has_no_first_token():
    durations = Durations()
    durations.observe(Ended("length", arrived=1, seated=2, ready=30, ended=30))
    found = samples(durations.families())
    assert found["phaseloop:request_seconds_count"] == found["phaseloop:prefill_seconds_count"] == 1
    assert found["phaseloop:first_token_seconds_count"] == 0
    assert found["phaseloop:decode_seconds_count"] == 0


async def counts(here: World) -> dict[str, float]:
    text = (await here.client.get("/metrics")).text
    return {
        name.removeprefix("phaseloop:").removesuffix("_seconds_count"): value
        for name, value in parsed(text).items()
        if name.endswith("_seconds_count")
    }


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", [[], ["\x00", "\x01", "\x02", "!", '"', "#"]])
async def test_requests_over_http_are_counted_once_each(stream, stop):
    async with world(TextEngine(length=5), MEASURED) as here:
        body = {"prompt": ["one", "two"], "stream": stream, "stop": stop}
        answer = await here.client.post("/completion", json=body)
        assert answer.status_code == 200
        found = await counts(here)
    spans = ("queue", "prefill", "barrier", "decode", "first_token", "request")
    assert found == dict.fromkeys(spans, 2)
