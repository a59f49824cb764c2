"""What `phaseloop replay` says about a fold: one screen for people, one object for programs."""

from collections.abc import Mapping
from typing import TypeVar

import msgspec
from msgspec import Struct

from phaseloop.core.vocabulary import FinishReason
from phaseloop.runtime.trace import Header
from phaseloop.sim.metrics import Summary
from phaseloop.sim.replay import Divergence, Verdict, present_core
from phaseloop.sim.replay_tally import Tally, Worst
from phaseloop.sim.replay_text import (
    SECOND,
    count_text,
    effect_text,
    event_text,
    name_of,
    span_text,
    time_text,
)
from phaseloop.sim.spread import Percentiles

Name = TypeVar("Name", bound=str)


class Report(Struct, frozen=True):
    """A fold that has come to its end, wherever that was."""

    path: str
    header: Header
    verdict: Verdict
    tally: Tally
    elapsed_s: float
    is_part: bool  # --until ended it

    @property
    def events_per_s(self) -> float:
        return self.verdict.events / self.elapsed_s if self.elapsed_s > 0 else 0.0


def report_lines(report: Report) -> list[str]:
    header, verdict = report.header, report.verdict
    part = ", up to the place asked for" if report.is_part else ""
    return [
        f"{report.path}: {header.policy.name} on {header.engine}, seed {header.seed}, "
        f"{count_text(header.limits.slot_count, 'slot')}",
        f"{count_text(verdict.events, 'event')}, {time_text(verdict.at_ns)} recorded{part}; "
        f"replayed in {report.elapsed_s:.2f} s, {report.events_per_s:,.0f} events/s",
        *tally_lines(report.tally),
        *verdict_lines(header, verdict),
    ]


def tally_lines(tally: Tally) -> list[str]:
    outcomes = [f"{count:,} {reason}" for reason, count in ranked(tally.outcomes)]
    if tally.unfinished:
        outcomes.append(f"{tally.unfinished:,} unfinished")
    rounds = [f"{count:,} {kind}" for kind, count in ranked(tally.rounds)]
    phases = [
        f"{name} {span_text(length_ns)} in {count_text(tally.phases.get(name, 0), 'turn')}"
        for name, length_ns in ranked(tally.phase_ns)
        if length_ns or name in tally.phases
    ]
    return [
        row("requests", f"{tally.requests:,}", outcomes),
        row("rounds", f"{sum(tally.rounds.values()):,}", rounds),
        row("tokens", f"{tally.tokens:,}", []),
        row("phases", f"{sum(tally.phases.values()):,}", phases),
        row("worst gap", worst_text(tally.worst_gap, "between two tokens"), []),
        row("worst wait", worst_text(tally.worst_wait, "to the first token or the end"), []),
    ]


def ranked(counts: Mapping[Name, int]) -> list[tuple[Name, int]]:
    """Largest first; equal ones stay in the order of their first occurrence."""
    return sorted(counts.items(), key=lambda item: -item[1])


def row(name: str, total: str, parts: list[str]) -> str:
    return f"  {name:<11}{total}" + (f": {', '.join(parts)}" if parts else "")


def worst_text(worst: Worst | None, of_what: str) -> str:
    if worst is None:
        return "none"
    who = name_of(worst.request_id, worst.choice)
    return f"{span_text(worst.length_ns)} {of_what}, {who}, until {time_text(worst.until_ns)}"


def verdict_lines(header: Header, verdict: Verdict) -> list[str]:
    """The verdict, and whatever a reader of it must know."""
    lines: list[str] = []
    if verdict.divergence is not None:
        lines += divergence_lines(header, verdict, verdict.divergence)
    else:
        lines.append("chain equal: the reducer decides as it did")
    lines += notes(header, verdict)
    return lines


def notes(header: Header, verdict: Verdict) -> list[str]:
    lines = [f"note: {note}" for note in verdict.state_notes]
    if verdict.fault is not None:
        lines.append(f"note: the reducer raises, as it did in the recorded run: {verdict.fault}")
    if not verdict.same_sources and verdict.divergence is None:
        lines.append(
            f"note: the sources of phaseloop.core are not those that wrote this trace "
            f"({header.core} by version {header.version}, now {present_core()})"
        )
    if verdict.torn_line is not None:
        lines.append(
            f"warning: line {verdict.torn_line} is torn, the process died while it was written; "
            "replayed up to the line before"
        )
    elif verdict.is_whole and verdict.footer is None and verdict.divergence is None:
        lines.append("note: there is no footer: the process ended without warning, or runs still")
    return lines


def divergence_lines(header: Header, verdict: Verdict, found: Divergence) -> list[str]:
    lines = [f"DIVERGED at line {found.line}, {divergence_place(found)}"]
    if found.event is not None:
        lines.append(f"  event: {event_text(found.event)}")
    lines += [f"  {line}" for line in cause_lines(header, verdict, found)]
    if found.what == "effects":
        lines.append("  the reducer now answers:")
        lines += [f"    {effect_text(effect)}" for effect in found.effects] or ["    nothing"]
    if found.subtrees is None:
        lines.append("  no checkpoint follows that could name the part of the state")
    elif found.subtrees:
        when = "the state differs in" if found.what == "state" else "the next checkpoint differs in"
        lines.append(f"  {when}: {', '.join(found.subtrees)}")
    else:
        lines.append("  the next checkpoint is equal: only this answer differs, not where it led")
    if verdict.differing > 1:
        lines.append(f"  {verdict.differing:,} places differ, each for itself")
    return lines


def divergence_place(found: Divergence) -> str:
    if found.event is None:
        return f"the checkpoint after event {found.seq}"
    return f"event {found.seq}, {time_text(found.event.at_ns)}"


def cause_lines(header: Header, verdict: Verdict, found: Divergence) -> list[str]:
    match found.what:
        case "invariant":
            return [f"it breaks an invariant: {found.detail}"]
        case "impure":
            return [f"the reducer is not pure: {found.detail}"]
        case "raised":
            what = f"the reducer raises {found.detail}"
        case "state":
            what = f"{found.detail} is not the recorded one"
        case "effects":
            what = "the chain does not follow from this event and its answer"
    if not verdict.same_sources:
        written = f"{header.core} (version {header.version})"
        return [what, f"the sources have changed: written by {written}, now {present_core()}"]
    edited = "the header or this line" if found.seq == 0 and found.event else "this line"
    return [what, f"the sources are those that wrote the trace, so {edited} was edited"]


def stats_lines(summary: Summary) -> list[str]:
    """Distributions of waits, in seconds, and the rates."""
    lines = [f"  {'seconds':<15}" + "".join(f"{name:>12}" for name in ("p50", "p95", "p99", "max"))]
    for name, spread in distributions(summary):
        values = (spread.p50, spread.p95, spread.p99, spread.max)
        cells = "".join(f"{'-' if value is None else f'{value:.3f}':>12}" for value in values)
        lines.append(f"  {name:<15}{cells}")
    rates = (
        ("prefill", summary.prefill_tokens_per_s, "tokens/s"),
        ("decode", summary.decode_tokens_per_s, "tokens/s"),
        ("makespan", summary.makespan_s, "s"),
        ("occupancy", summary.decode_occupancy, "of the slots"),
    )
    return lines + [
        f"  {name:<15}{'-' if value is None else f'{value:.3f}'} {unit}"
        for name, value, unit in rates
    ]


def comparison_lines(columns: dict[str, Summary]) -> list[str]:
    """The same figures of several runs, side by side; the last column also against the first."""
    names = list(columns)
    lines = [f"  {'':<20}" + "".join(f"{name:>14}" for name in names)]
    tables = {name: comparison(summary) for name, summary in columns.items()}
    for label in tables[names[0]]:
        cells = "".join(f"{figure_text(tables[name][label]):>14}" for name in names)
        lines.append(f"  {label:<20}{cells}")
    return lines


def comparison(summary: Summary) -> dict[str, float | None]:
    figures: dict[str, float | None] = {}
    for name, spread in distributions(summary):
        figures[f"{name} p50 s"] = spread.p50
        figures[f"{name} p95 s"] = spread.p95
        figures[f"{name} max s"] = spread.max
    return figures | {
        "makespan s": summary.makespan_s,
        "prefill tokens/s": summary.prefill_tokens_per_s,
        "decode tokens/s": summary.decode_tokens_per_s,
        "rounds": summary.rounds,
        "phase changes": summary.phase_changes,
        "finished": summary.finished,
        "cancelled": summary.cancelled,
        "expired": summary.expired,
        "refused": summary.refused,
        "failed": summary.failed,
        "unfinished": summary.unfinished,
    }


def figure_text(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"


def distributions(summary: Summary) -> tuple[tuple[str, Percentiles], ...]:
    return (
        ("ttft", summary.ttft_s),
        ("gap", summary.gap_s),
        ("queue wait", summary.queue_wait_s),
        ("prefill wait", summary.prefill_wait_s),
        ("barrier wait", summary.barrier_wait_s),
    )


# --- for programs ---------------------------------------------------------------------------------


def report_object(report: Report) -> dict[str, object]:
    verdict, tally = report.verdict, report.tally
    found = verdict.divergence
    return {
        "trace": report.path,
        "exit_code": verdict.exit_code,
        "policy": report.header.policy.name,
        "engine": report.header.engine,
        "seed": report.header.seed,
        "events": verdict.events,
        "recorded_s": verdict.at_ns / SECOND,
        "elapsed_s": report.elapsed_s,
        "events_per_s": report.events_per_s,
        "same_sources": verdict.same_sources,
        "torn_line": verdict.torn_line,
        "footer": None if verdict.footer is None else msgspec.to_builtins(verdict.footer),
        "divergence": None if found is None else divergence_object(found),
        "differing": verdict.differing,
        "fault": verdict.fault,
        "notes": list(verdict.state_notes),
        "requests": tally.requests,
        "outcomes": outcomes_object(tally),
        "rounds": dict(tally.rounds),
        "tokens": tally.tokens,
        "phases": {
            name: {"turns": tally.phases.get(name, 0), "seconds": length_ns / SECOND}
            for name, length_ns in tally.phase_ns.items()
        },
        "worst_gap": worst_object(tally.worst_gap),
        "worst_wait": worst_object(tally.worst_wait),
    }


def outcomes_object(tally: Tally) -> dict[FinishReason | str, int]:
    return {**tally.outcomes, "unfinished": tally.unfinished}


def divergence_object(found: Divergence) -> dict[str, object]:
    return {
        "what": found.what,
        "line": found.line,
        "seq": found.seq,
        "event": None if found.event is None else msgspec.to_builtins(found.event),
        "effects": msgspec.to_builtins(found.effects),
        "detail": found.detail,
        "subtrees": None if found.subtrees is None else list(found.subtrees),
    }


def worst_object(worst: Worst | None) -> dict[str, object] | None:
    if worst is None:
        return None
    return {
        "length_s": worst.length_ns / SECOND,
        "request_id": worst.request_id,
        "choice": worst.choice,
        "until_s": worst.until_ns / SECOND,
    }
