"""What the recorded run would have been: --what-if, --inject and --shrink."""

from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack

from msgspec.structs import replace

from phaseloop import __version__
from phaseloop.core.state import initial
from phaseloop.core.vocabulary import LaunchRound
from phaseloop.runtime.digest import core_digest
from phaseloop.runtime.trace import Header, Reader, TraceWriter
from phaseloop.sim.metrics import Collector, Summary
from phaseloop.sim.replay import EXIT_OK, Fold, Step
from phaseloop.sim.replay_figures import figures_of
from phaseloop.sim.replay_inject import FaultError, Injection, parse_faults
from phaseloop.sim.replay_predicate import PredicateError, parse_predicate
from phaseloop.sim.replay_rerun import Fault, Rerun, RerunError, Watcher
from phaseloop.sim.replay_scenario import Scenario, Scribe
from phaseloop.sim.replay_shrink import Shrinker, requests_of
from phaseloop.sim.replay_snippet import snippet
from phaseloop.sim.replay_text import count_text
from phaseloop.sim.replay_whatif import ChangeError, check_effect, parse_changes, summary_of

from .errors import UserError
from .replay_cost import Pricing, pricing_of
from .replay_files import create, open_source, with_progress, write_lines, write_object
from .replay_report import comparison_lines, verdict_lines

TRIES = 2000
INPUT_ERRORS = (ChangeError, FaultError, PredicateError, RerunError)


def change(args: Namespace) -> int:
    """Raises UserError, TraceError or OSError."""
    try:
        if args.what_if is not None:
            return what_if(args)
        if args.inject is not None:
            return inject(args)
        return shrink(args)
    except INPUT_ERRORS as error:
        raise UserError(str(error)) from None


def fold_all(args: Namespace, watchers: Callable[[Header], list[Callable[[Step], None]]]) -> Header:
    """Show the whole trace to the watchers.  One that does not replay is refused, unless forced."""
    with ExitStack() as files:
        source = open_source(args.trace, files)
        fold = Fold(Reader(args.trace, source), force=args.force)
        header = fold.reader.header
        watching = watchers(header)
        for step in with_progress(iter(fold), source, args.trace.stat().st_size):
            for see in watching:
                see(step)
    verdict = fold.verdict()
    if verdict.exit_code != EXIT_OK and not args.force:
        lines = "\n  ".join(verdict_lines(header, verdict))
        what = "does not replay, so nothing follows from it (--force goes on)"
        raise UserError(f"{args.trace} {what}:\n  {lines}", verdict.exit_code)
    return header


class Past:
    """A trace, taken apart: what came from outside, and how it went."""

    def __init__(self, args: Namespace) -> None:
        self.header = fold_all(args, self._watch)
        self.pricing: Pricing = pricing_of(args, self.header)
        self.scenario: Scenario = self.pricing.applied(self.scribe.scenario())
        self.summary: Summary = self.collector.summary()

    def _watch(self, header: Header) -> list[Callable[[Step], None]]:
        self.scribe = Scribe(header.limits, header.policy)
        self.collector = Collector(header.limits, header.policy)
        return [self.scribe.see, collecting(self.collector)]


def collecting(collector: Collector) -> Callable[[Step], None]:
    def see(step: Step) -> None:
        collector.observe(step.event, step.before, step.after, step.effects)

    return see


def made_trace(
    args: Namespace, header: Header, scenario: Scenario, files: ExitStack
) -> TraceWriter:
    """The trace of a run that was made again; `--out` names it."""
    state = initial(scenario.limits, scenario.policy)
    header = replace(
        header,
        version=__version__,
        core=core_digest(),
        policy=scenario.policy,
        limits=scenario.limits,
        content="counts",
        cache_ram_bytes=None,
    )
    return TraceWriter(create(args.out, files), header, state)


def run_again(args: Namespace, past: Past, scenario: Scenario) -> Summary:
    """One run of the scenario; its trace goes to `--out`, if named."""
    with ExitStack() as files:
        if args.out is None:
            return summary_of(scenario, past.pricing.cost)
        writer = made_trace(args, past.header, scenario, files)
        summary = summary_of(scenario, past.pricing.cost, (writer.append,))
        writer.close("done", 0)
        return summary


# --- what if --------------------------------------------------------------------------------------


def what_if(args: Namespace) -> int:
    """As recorded, made again as it was, and made again with the change.

    The second tells how far the cost model can be trusted: it differs from the first only by that.
    """
    changed = parse_changes(args.what_if)
    past = Past(args)
    scenario = changed(past.scenario)
    check_effect(args.what_if, past.scenario, scenario)
    columns = {
        "recorded": past.summary,
        "modelled": summary_of(past.scenario, past.pricing.cost),
        "what if": run_again(args, past, scenario),
    }
    if args.json:
        write_object(
            {"what_if": args.what_if, "cost": past.pricing.name, "notes": notes(past), **columns}
        )
        return EXIT_OK
    write_lines(
        [
            f"{args.trace}: {past.header.policy.name}, what if {args.what_if}?",
            f"modelled: the same run with durations from {past.pricing.name}; what if: its twin",
            *comparison_lines(columns),
            *(f"note: {note}" for note in notes(past)),
            *wrote(args),
        ]
    )
    return EXIT_OK


def notes(past: Past) -> list[str]:
    """What a run that is made again cannot know."""
    lines = list(past.pricing.notes)
    if past.scenario.cut:
        what = count_text(past.scenario.cut, "answer") + " did not end by itself"
        lines.append(f"{what}; it is taken to go on until something cuts it again")
    if past.scenario.until_ns is not None:
        lines.append("the trace ends with requests under way; the runs made of it end there, too")
    if past.scenario.prefixes:
        lines.append(
            "which prompts begin alike is inferred: two of a family are taken to share all that "
            "either is known to share"
        )
    return lines


def wrote(args: Namespace) -> list[str]:
    return [] if args.out is None else [f"wrote {args.out}"]


# --- inject ---------------------------------------------------------------------------------------


class Disturbance:
    """A trace up to its first fault, and how it goes on from there."""

    def __init__(self, args: Namespace, faults: tuple[Fault, ...], files: ExitStack) -> None:
        """`files` closes what is opened: `--out`, if named, gets the trace of the disturbed run."""
        self._args, self._faults, self._files = args, faults, files
        self.first = min(fault.seq for fault in faults)
        self.rounds_after = 0  # of the recorded run, the one in flight included
        self._watchers: list[Watcher] = []  # of the disturbed run, from its beginning
        self._writer: TraceWriter | None = None
        self.header = fold_all(args, self._watch)

    def run(self) -> Rerun:
        pricing = pricing_of(self._args, self.header)
        scenario = pricing.applied(self._scribe.scenario())
        rerun = self._injection.rerun(scenario, pricing.cost, self._faults, tuple(self._watchers))
        rerun.run()
        if self._writer is not None:
            self._writer.close("done", 0)
        return rerun

    def summaries(self) -> dict[str, Summary]:
        return {"recorded": self._recorded.summary(), "injected": self._injected.summary()}

    def _watch(self, header: Header) -> list[Callable[[Step], None]]:
        self._scribe = Scribe(header.limits, header.policy)
        self._recorded = Collector(header.limits, header.policy)
        self._injected = Collector(header.limits, header.policy)
        self._injection = Injection(self._scribe, self.first)
        self._watchers.append(self._injected.observe)
        if self._args.out is not None:
            self._writer = made_trace(self._args, header, self._scribe.scenario(), self._files)
            self._watchers.append(self._writer.append)
        return [self._scribe.see, collecting(self._recorded), self._injection.see, self._see]

    def _see(self, step: Step) -> None:
        if step.seq == self.first:
            self.rounds_after += step.after.flight is not None
        if step.seq > self.first:
            self.rounds_after += any(isinstance(effect, LaunchRound) for effect in step.effects)
            return
        for watch in self._watchers:
            watch(step.event, step.before, step.after, step.effects)


def inject(args: Namespace) -> int:
    with ExitStack() as files:
        disturbance = Disturbance(args, parse_faults(args.inject), files)
        rerun = disturbance.run()
    if rerun.faults:
        missed = ", ".join(f"{fault.kind}@{fault.seq}" for fault in rerun.faults)
        end = f"the run ends with event {rerun.seq - 1}"
        raise UserError(f"--inject: {missed} did not strike: {end}")
    if rerun.missed:
        missed = ", ".join(f"{f.kind}@{f.seq}:req:{f.request_id}" for f in rerun.missed)
        raise UserError(f"--inject: {missed} finds nobody: no such request is alive there")
    columns = disturbance.summaries()
    reused = rerun.engine.reused
    if args.json:
        write_object({"inject": args.inject, "rounds_as_recorded": reused, **columns})
        return EXIT_OK
    write_lines(
        [
            f"{args.trace}: {args.inject}",
            f"as recorded up to event {disturbance.first}; from there on {reused:,} of "
            f"{count_text(disturbance.rounds_after, 'round')} ended as recorded",
            *comparison_lines(columns),
            *wrote(args),
        ]
    )
    return EXIT_OK


# --- shrink ---------------------------------------------------------------------------------------


def shrink(args: Namespace) -> int:
    """Print the smallest run that still shows the predicate, as a test; `--out` gets its trace."""
    if args.predicate is None:
        raise UserError("--shrink wants --predicate, such as --predicate 'gap_max_ms > 500'")
    past = Past(args)
    recorded = figures_of(past.summary)
    predicate = parse_predicate(args.predicate, tuple(recorded))
    shrinker = Shrinker(past.scenario, past.pricing.cost, predicate, tries_of(args))
    if not shrinker.shows(shrinker.scenario):
        raise UserError(refusal_text(args, predicate(recorded), past.pricing.name))
    before = len(requests_of(past.scenario))
    is_minimal = shrinker.shrink()
    summary = run_again(args, past, shrinker.scenario)
    test = snippet(shrinker.scenario, past.pricing.cost, args.predicate, args.trace.name)
    after = len(requests_of(shrinker.scenario))
    if args.json:
        write_object(
            {
                "predicate": args.predicate,
                "cost": past.pricing.name,
                "requests_before": before,
                "requests": after,
                "tries": shrinker.tries,
                "minimal": is_minimal,
                "summary": summary,
                "test": test,
            }
        )
        return EXIT_OK
    end = "nothing can be spared" if is_minimal else "stopped at --tries, it may get smaller"
    write_lines(
        [
            f"# {count_text(before, 'request')} shrunk to {after} in {shrinker.tries} runs: {end}",
            *(f"# {line}" for line in wrote(args)),
        ]
    )
    write_lines([test.rstrip("\n")])
    return EXIT_OK


def tries_of(args: Namespace) -> int:
    if args.tries is None:
        return TRIES
    if args.tries < 1:
        raise UserError(f"--tries {args.tries}: must be at least 1")
    return args.tries


def refusal_text(args: Namespace, was_recorded: bool, cost: str) -> str:
    if not was_recorded:
        return f"--predicate: {args.predicate!r} does not hold for this trace: see its --stats"
    return (
        f"--predicate: {args.predicate!r} holds for the recorded run, but not for the same run "
        f"with durations from {cost}; name a better cost model with --cost"
    )
