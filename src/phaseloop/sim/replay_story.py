"""The story of one request: every span it spent anywhere, why, and who was in its way.

A span lasts while one choice of the request keeps its place (role and slot) and the reason that
core/explain.py gives stays the same.  Reasons are those of `core.explain.REASONS`.
"""

from msgspec import Struct

from phaseloop.core.explain import REASONS, Waiting, WaitReason, explain
from phaseloop.core.vocabulary import (
    DeliverTokens,
    FinishReason,
    FinishRequest,
    LaunchRound,
    Request,
    RequestArrived,
    RequestId,
    SlotIndex,
)

from .replay import Step
from .replay_text import count_text, request_text, requests_text, span_text, time_text

SPANS_SHOWN = 6  # of one stay; more are summed up by reason

# The engine at work for the request itself is no waiting, nor is what follows its end.
WORKING: tuple[WaitReason, ...] = ("in_round", "round_ending", "cache_saving")


class Span(Struct):
    """From `since_ns` to `until_ns` one choice stood in one place for one reason."""

    choice: int
    role: str
    slot: SlotIndex | None
    reason: WaitReason
    since_ns: int
    until_ns: int
    line: int  # of the event that began it
    blocked_by: tuple[RequestId, ...]
    rounds: int = 0  # launched with a lane of this choice
    tokens: int = 0  # delivered

    @property
    def length_ns(self) -> int:
        return self.until_ns - self.since_ns


class Story(Struct):
    request: Request
    arrived_ns: int
    line: int
    spans: list[Span]
    tokens: int = 0
    ended_ns: int | None = None
    outcome: FinishReason | None = None
    last_ns: int = 0  # the time of the last event seen


class Storyteller:
    """Watches a fold for one request."""

    def __init__(self, request_id: RequestId) -> None:
        self.request_id = request_id
        self.story: Story | None = None
        self._open: dict[int, Span] = {}

    def see(self, step: Step) -> None:
        story = self.story
        if story is None:
            story = self._begin(step)
            if story is None:
                return
        elif story.outcome is not None:
            return
        now_ns = story.last_ns = step.event.at_ns
        self._count(step, story)
        self._continue(step, story, now_ns)
        for effect in step.effects:
            if isinstance(effect, FinishRequest) and effect.request_id == self.request_id:
                story.outcome, story.ended_ns = effect.reason, now_ns
                self._close(story, now_ns, {})

    def _begin(self, step: Step) -> Story | None:
        event = step.event
        if not isinstance(event, RequestArrived):
            return None
        for request in event.requests:
            if request.request_id == self.request_id:
                self.story = Story(request, event.at_ns, step.line, [], last_ns=event.at_ns)
                return self.story
        return None

    def _count(self, step: Step, story: Story) -> None:
        """Tokens belong to the span they end, rounds to the one they begin."""
        for effect in step.effects:
            if isinstance(effect, DeliverTokens):
                for delivery in effect.deliveries:
                    if delivery.request_id == self.request_id:
                        story.tokens += delivery.tokens
                        if span := self._open.get(delivery.choice):
                            span.tokens += delivery.tokens

    def _continue(self, step: Step, story: Story, now_ns: int) -> None:
        standing = {w.choice: w for w in explain(step.after, self.request_id, now_ns)}
        self._close(story, now_ns, standing)
        for choice, waiting in standing.items():
            span = self._open.get(choice)
            if span is None:
                self._open[choice] = begin_span(waiting, now_ns, step.line)
            else:
                span.blocked_by = merged(span.blocked_by, waiting.blocked_by)
        for effect in step.effects:
            if isinstance(effect, LaunchRound):
                for lane in effect.lanes:
                    span = self._open.get(lane.choice)
                    if lane.request_id == self.request_id and span is not None:
                        span.rounds += 1

    def _close(self, story: Story, now_ns: int, standing: dict[int, Waiting]) -> None:
        """End every open span that its choice has left; those without length are nobody's wait."""
        for choice, span in list(self._open.items()):
            waiting = standing.get(choice)
            if waiting is not None and place_of(waiting) == (span.role, span.slot, span.reason):
                continue
            span.until_ns = now_ns
            if span.length_ns or span.tokens:
                story.spans.append(span)
            del self._open[choice]

    def finished(self) -> Story | None:
        """The story so far; spans still open end at the last event seen."""
        if self.story is not None and self.story.outcome is None:
            self._close(self.story, self.story.last_ns, {})
        return self.story


def begin_span(waiting: Waiting, now_ns: int, line: int) -> Span:
    return Span(
        waiting.choice, waiting.role, waiting.slot, waiting.reason, now_ns, now_ns, line,
        waiting.blocked_by,
    )  # fmt: skip


def place_of(waiting: Waiting) -> tuple[str, SlotIndex | None, WaitReason]:
    return waiting.role, waiting.slot, waiting.reason


def merged(ids: tuple[RequestId, ...], more: tuple[RequestId, ...]) -> tuple[RequestId, ...]:
    return ids if ids == more else tuple(dict.fromkeys(ids + more))


def waits(story: Story) -> dict[WaitReason, int]:
    """Nanoseconds waited by reason, longest first; ties by name."""
    sums: dict[WaitReason, int] = {}
    for span in story.spans:
        if span.reason not in WORKING and span.length_ns:
            sums[span.reason] = sums.get(span.reason, 0) + span.length_ns
    return dict(sorted(sums.items(), key=lambda item: (-item[1], item[0])))


# --- in words -------------------------------------------------------------------------------------


def story_lines(story: Story) -> list[str]:
    request = story.request
    lines = [
        f"request {request.request_id}: {request_text(request)}",
        f"{time_text(story.arrived_ns)}  arrives (line {story.line})",
    ]
    for choice in sorted({span.choice for span in story.spans}):
        if request.choices > 1:
            lines.append(f"choice {choice}")
        spans = [span for span in story.spans if span.choice == choice]
        for stay in stays(spans):
            lines += stay_lines(stay)
    lines += ending_lines(story)
    return lines


def stays(spans: list[Span]) -> list[list[Span]]:
    """Neighbours that share role and slot."""
    groups: list[list[Span]] = []
    for span in spans:
        last = groups[-1][-1] if groups else None
        if last is not None and (last.role, last.slot) == (span.role, span.slot):
            groups[-1].append(span)
        else:
            groups.append([span])
    return groups


def stay_lines(stay: list[Span]) -> list[str]:
    first, last = stay[0], stay[-1]
    where = first.role + ("" if first.slot is None else f" in slot {first.slot}")
    length = span_text(last.until_ns - first.since_ns)
    counts = {"round": sum(s.rounds for s in stay), "token": sum(s.tokens for s in stay)}
    done = "".join(f", {count_text(n, noun)}" for noun, n in counts.items() if n)
    lines = [f"{time_text(first.since_ns)}  {where} for {length}{done}"]
    if len(stay) <= SPANS_SHOWN:
        return lines + [f"    {span_line(span)}" for span in stay]
    return lines + [f"    {summed}" for summed in summed_lines(stay)]


def span_line(span: Span) -> str:
    blockers = f"; held by {requests_text(span.blocked_by)}" if span.blocked_by else ""
    length = span_text(span.length_ns)
    return f"{time_text(span.since_ns)} +{length} {span.reason}: {REASONS[span.reason]}{blockers}"


def summed_lines(stay: list[Span]) -> list[str]:
    lines: list[str] = []
    reasons: dict[WaitReason, None] = dict.fromkeys(span.reason for span in stay)
    for reason in reasons:
        spans = [span for span in stay if span.reason == reason]
        total = span_text(sum(span.length_ns for span in spans))
        ids: tuple[RequestId, ...] = ()
        for span in spans:
            ids = merged(ids, span.blocked_by)
        blockers = f"; held by {requests_text(ids)}" if ids else ""
        since = time_text(spans[0].since_ns)
        times = f" in {len(spans)} spans" if len(spans) > 1 else ""
        lines.append(f"{since} +{total}{times} {reason}: {REASONS[reason]}{blockers}")
    return lines


def ending_lines(story: Story) -> list[str]:
    if story.outcome is None or story.ended_ns is None:
        lines = [f"{time_text(story.last_ns)}  not ended here; {count_text(story.tokens, 'token')}"]
        total_ns = story.last_ns - story.arrived_ns
    else:
        tokens = count_text(story.tokens, "token")
        lines = [f"{time_text(story.ended_ns)}  ends: {story.outcome}, {tokens}"]
        total_ns = story.ended_ns - story.arrived_ns
    waited = waits(story)
    if waited and story.request.choices == 1:
        parts = ", ".join(f"{span_text(ns)} {reason}" for reason, ns in waited.items())
        lines.append(f"waited {span_text(sum(waited.values()))} of {span_text(total_ns)}: {parts}")
    return lines
