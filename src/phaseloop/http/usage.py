"""Figures that go with an answer: tokens, speeds, and where the time went.

Speeds are of work: a prompt's time is that of the rounds which carried a part of it, an answer's of
those which sampled for it, each counted whole however many others shared it.  What a request waited
is told apart from that, in the member `phaseloop`.
"""

from collections.abc import Iterable

from msgspec import Struct

from phaseloop.runtime.timing import Timing

from .request_fields import Json

MS = 1e6


class Work(Struct, frozen=True):
    """What was done, for one choice or for several; times in nanoseconds."""

    cached: int = 0  # prompt tokens found instead of computed
    processed: int = 0
    prompt_ns: int = 0
    predicted: int = 0
    steps: int = 0  # tokens but the first of each choice, which the prompt's own round gave
    predicted_ns: int = 0
    drafted: int = 0  # tokens that were guessed
    accepted: int = 0  # and right

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.cached + other.cached,
            self.processed + other.processed,
            self.prompt_ns + other.prompt_ns,
            self.predicted + other.predicted,
            self.steps + other.steps,
            self.predicted_ns + other.predicted_ns,
            self.drafted + other.drafted,
            self.accepted + other.accepted,
        )

    def as_timings(self) -> Json:
        """llama-server's `timings`, with its names and their order."""
        prompt_ms, predicted_ms = self.prompt_ns / MS, self.predicted_ns / MS
        drafts = {"draft_n": self.drafted, "draft_n_accepted": self.accepted}
        return {
            "cache_n": self.cached,
            "prompt_n": self.processed,
            "prompt_ms": prompt_ms,
            "prompt_per_token_ms": ratio(prompt_ms, self.processed),
            "prompt_per_second": 1e3 * ratio(self.processed, prompt_ms),
            "predicted_n": self.predicted,
            "predicted_ms": predicted_ms,
            "predicted_per_token_ms": ratio(predicted_ms, self.steps),
            "predicted_per_second": 1e3 * ratio(self.steps, predicted_ms),
            **(drafts if self.drafted else {}),
        }


def work_of(timing: Timing, predicted: Iterable[int]) -> Work:
    """`predicted`: the tokens of each choice."""
    counts = tuple(predicted)
    return Work(
        cached=timing.cached,
        processed=timing.processed,
        prompt_ns=timing.prefill_work_ns,
        predicted=sum(counts),
        steps=sum(max(0, count - 1) for count in counts),
        predicted_ns=timing.decode_work_ns,
        drafted=timing.drafted,
        accepted=timing.accepted,
    )


def ratio(amount: float, per: float) -> float:
    """0 where there is nothing to divide by: clients do arithmetic with these."""
    return amount / per if per > 0 else 0.0


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Json:
    return {
        "completion_tokens": completion_tokens,
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def spans(timing: Timing, now_ns: int, policy: str, cohort: int | None) -> Json:
    """The member `phaseloop`: milliseconds of each part of the request's life, up to now."""
    end_ns = timing.ended_ns if timing.ended_ns is not None else now_ns

    def span(start_ns: int | None, stop_ns: int | None) -> float:
        if start_ns is None:
            return 0.0
        return max(0, (end_ns if stop_ns is None else stop_ns) - start_ns) / MS

    return {
        "queue_ms": span(timing.arrived_ns, timing.seated_ns),
        "prefill_ms": span(timing.seated_ns, timing.ready_ns),
        "barrier_wait_ms": span(timing.ready_ns, timing.opened_ns),
        "decode_ms": span(timing.opened_ns, None),
        "cohort": cohort,
        "policy": policy,
    }
