"""How long requests waited and were worked on, as distributions for Prometheus."""

from collections.abc import Iterable, Mapping
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric

from phaseloop.runtime.gateway import Stream
from phaseloop.runtime.tally import SECONDS, Distribution, Tally

NS = 1e9


class Histogram(Distribution):
    """Of seconds."""

    def __init__(self) -> None:
        super().__init__(SECONDS)

    def family(self, name: str, text: str) -> Metric:
        family = HistogramMetricFamily(name, text)
        family.add_metric([], buckets(self), self.sum)
        return family


def buckets(distribution: Distribution) -> list[tuple[str, float]]:
    bounds = [*map(str, distribution.bounds), "+Inf"]
    return list(zip(bounds, accumulate(distribution.counts), strict=True))


class Durations:
    """Of the requests that were answered to their end; who left or was refused is not counted."""

    def __init__(self) -> None:
        self.queue = Histogram()
        self.prefill = Histogram()
        self.barrier = Histogram()
        self.decode = Histogram()
        self.first_token = Histogram()
        self.request = Histogram()

    def observe(self, stream: Stream) -> None:
        timing = stream.timing
        arrived_ns, first_ns, ended_ns = timing.arrived_ns, timing.first_ns, timing.ended_ns
        if stream.outcome not in ("stop", "length") or arrived_ns is None or ended_ns is None:
            return
        self.queue.observe(timing.queue_ns() / NS)
        self.prefill.observe(timing.prefill_ns() / NS)
        self.request.observe((ended_ns - arrived_ns) / NS)
        if first_ns is not None:  # a request of no tokens has neither a barrier nor a decode phase
            self.barrier.observe(timing.barrier_ns() / NS)
            self.decode.observe(timing.decode_ns() / NS)
            self.first_token.observe((first_ns - arrived_ns) / NS)

    def families(self) -> Iterable[Metric]:
        name = "phaseloop:{}_seconds".format
        yield self.queue.family(name("queue"), "From a request's arrival to its slot.")
        yield self.prefill.family(name("prefill"), "From the slot to the end of the prompt.")
        yield self.barrier.family(name("barrier"), "From there until the cohort generates.")
        yield self.decode.family(name("decode"), "From there to the end of the answer.")
        yield self.first_token.family(name("first_token"), "From the arrival to the first token.")
        yield self.request.family(name("request"), "From the arrival to the end.")


def tallied(tally: Tally) -> Iterable[Metric]:
    """How the policy spends the engine."""
    name = "phaseloop:{}".format
    gaps = {"same_phase": tally.gaps_within, "across_switch": tally.gaps_across}
    text = "From one delivery of tokens to the next, by whether the phase changed between."
    yield labelled_histogram(name("inter_token_seconds"), text, "gap", gaps)
    cohorts = HistogramMetricFamily(
        name("cohort_size"), "Sequences that generate when a decode phase begins."
    )
    cohorts.add_metric([], buckets(tally.cohorts), tally.cohorts.sum)
    yield cohorts
    text = "Time of rounds by kind."
    yield labelled_histogram(name("round_seconds"), text, "kind", {**tally.rounds})


def labelled_histogram(
    name: str, text: str, label: str, distributions: Mapping[str, Distribution]
) -> Metric:
    family = HistogramMetricFamily(name, text, labels=[label])
    for value, one in distributions.items():
        family.add_metric([value], buckets(one), one.sum)
    return family
