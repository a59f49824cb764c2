"""How long requests waited and were worked on, as distributions for Prometheus."""

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric

from phaseloop.runtime.gateway import Stream

NS = 1e9
# Seconds, upper ends: from a small model's decode round to a prompt of many pages.
BOUNDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
    1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0,
)  # fmt: skip


class Histogram:
    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(BOUNDS, seconds)] += 1
        self._sum_s += seconds

    def family(self, name: str, text: str) -> Metric:
        bounds = [*map(str, BOUNDS), "+Inf"]
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        return HistogramMetricFamily(name, text, buckets=buckets, sum_value=self._sum_s)


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
