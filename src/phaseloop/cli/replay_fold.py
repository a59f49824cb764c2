"""One fold of a trace, with whatever was asked for watching it: the report, a story, exports."""

import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from msgspec.structs import replace

from phaseloop.runtime.trace import Reader
from phaseloop.sim.metrics import Collector
from phaseloop.sim.replay import EXIT_OK, Fold, Step
from phaseloop.sim.replay_cursor import Target, parse_target, reaches, upto
from phaseloop.sim.replay_export import Redactor, RequestTable
from phaseloop.sim.replay_perfetto import Perfetto
from phaseloop.sim.replay_show import Show, parse_show, show_lines
from phaseloop.sim.replay_story import Story, Storyteller, story_lines
from phaseloop.sim.replay_tally import Tally

from .errors import UserError
from .replay_files import (
    create,
    create_text,
    open_source,
    with_progress,
    write_lines,
    write_object,
)
from .replay_html import TimelineFile, TimelinePage
from .replay_report import Report, report_lines, report_object, stats_lines, verdict_lines

Watcher = Callable[[Step], None]


class Views:
    """What was asked for of a fold; each part is a watcher or nothing."""

    def __init__(self, args: Namespace, fold: Fold, files: ExitStack) -> None:
        self.tally = Tally()
        self.watchers: list[Watcher] = [self.tally.see]
        self.last: Step | None = None
        self.now_ns: int | None = None  # the moment asked for, if it is not the last event's
        self.first = fold.state
        self.show: Show | None = None if args.show is None else parse_show(args.show)
        if self.show is not None:
            self.watchers.append(self._keep)
        self.teller: Storyteller | None = None
        if args.why is not None:
            self.teller = Storyteller(parse_target_request(args.why))
            self.watchers.append(self.teller.see)
        self.collector: Collector | None = None
        if args.stats:
            self.collector = Collector(fold.reader.header.limits, fold.reader.header.policy)
            self.watchers.append(self._collect)
        self.exports = Exports(args, fold, files)
        self.watchers += self.exports.watchers

    def close(self, fold: Fold) -> None:
        self.tally.close()
        self.exports.close(fold)

    def story(self) -> Story | None:
        """Raises UserError where the request does not occur."""
        if self.teller is None:
            return None
        story = self.teller.finished()
        if story is None:
            raise UserError(f"request {self.teller.request_id} does not occur up to there")
        return story

    def shown(self) -> list[str]:
        if self.show is None:
            return []
        state = self.first if self.last is None else self.last.after
        if self.show.view == "request" and self.show.request_id > state.request_id_last:
            raise UserError(f"request {self.show.request_id} does not occur up to there")
        if self.last is None:
            return show_lines(self.show, state, 0)
        now_ns = self.last.event.at_ns if self.now_ns is None else self.now_ns
        return show_lines(self.show, state, now_ns)

    def _keep(self, step: Step) -> None:
        self.last = step

    def _collect(self, step: Step) -> None:
        assert self.collector is not None
        self.collector.observe(step.event, step.before, step.after, step.effects)


class Exports:
    """The files to be written."""

    def __init__(self, args: Namespace, fold: Fold, files: ExitStack) -> None:
        self.watchers: list[Watcher] = []
        self.names: list[str] = []
        self.table: RequestTable | None = None
        self.perfetto: Perfetto | None = None
        self.redactor: Redactor | None = None
        self.timelines: list[TimelineFile | TimelinePage] = []
        if args.csv is not None:
            self.table = RequestTable(create_text(self._named(args.csv), files))
            self.watchers.append(self.table.see)
        if args.perfetto is not None:
            out = create(self._named(args.perfetto), files)
            self.perfetto = Perfetto(out, fold.state)
            self.watchers.append(self.perfetto.see)
        if args.redact is not None:
            out = create(self._named(args.redact), files)
            self.redactor = Redactor(out, fold.reader.header, fold.state)
            self.watchers.append(self.redactor.see)
        name = args.trace.name
        if args.timeline is not None:
            out = create(self._named(args.timeline), files)
            self.timelines.append(TimelineFile(out.write, fold.state, name))
        if args.html is not None:
            out = create(self._named(args.html), files)
            self.timelines.append(TimelinePage(out, fold.state, name))
        self.watchers += [timeline.see for timeline in self.timelines]

    def close(self, fold: Fold) -> None:
        if self.table is not None:
            self.table.close()
        if self.perfetto is not None:
            self.perfetto.close()
        for timeline in self.timelines:
            timeline.close()
        if self.redactor is not None:
            self.redactor.close(fold.reader.footer)

    def lines(self) -> list[str]:
        lines = [f"wrote {name}" for name in self.names]
        if self.redactor is not None:
            lines.append(redaction_text(self.redactor.dropped))
        return lines

    def _named(self, path: Path) -> Path:
        self.names.append(str(path))
        return path


def redaction_text(dropped: dict[str, int]) -> str:
    if not dropped:
        return "it held no text and no token ids, nor anything else to drop: the chain is as it was"
    parts = ", ".join(f"{name} ({count})" if count > 1 else name for name, count in dropped.items())
    return f"dropped: {parts}; the chain is a new one, over the same decisions"


def parse_target_request(text: str) -> int:
    """The ID of `req:ID`, or of a plain number."""
    target = parse_target(text if text.startswith("req:") else f"req:{text}")
    return target.value


def fold_once(args: Namespace) -> int:
    """Fold the trace, or its beginning, and print what was asked for."""
    target = None if args.until is None else parse_target(args.until)
    with ExitStack() as files:
        source = open_source(args.trace, files)
        reader = Reader(args.trace, source)
        fold = Fold(reader, force=args.force, twice=args.twice, check=args.check)
        views = Views(args, fold, files)
        start_s = time.perf_counter()
        size = args.trace.stat().st_size
        steps = with_progress(upto(iter(fold), target), source, size)
        last = watch(steps, views.watchers)
        elapsed_s = time.perf_counter() - start_s
        views.close(fold)
    verdict = fold.verdict()
    if target is not None:
        if verdict.divergence is None:
            check_reached(target, last)
        # To know that a time has come the fold has looked at the event after it.
        seen, at_ns = (0, 0) if last is None else (last.seq + 1, last.event.at_ns)
        verdict = replace(verdict, events=seen, at_ns=at_ns)
        if target.kind == "time":
            views.now_ns = target.value
    is_part = target is not None
    report = Report(str(args.trace), reader.header, verdict, views.tally, elapsed_s, is_part)
    if args.json:
        print_object(report, views)
    else:
        print_text(report, views)
    return report.verdict.exit_code


def watch(steps: Iterator[Step], watchers: list[Watcher]) -> Step | None:
    """Show every step to every watcher; the last one."""
    step = None
    if len(watchers) == 1:
        see = watchers[0]
        for step in steps:
            see(step)
    else:
        for step in steps:
            for see in watchers:
                see(step)
    return step


def check_reached(target: Target, last: Step | None) -> None:
    """Raises UserError where the trace ended before the place; it gets to any time."""
    if target.kind != "time" and (last is None or not reaches(target, last)):
        raise UserError(f"--until: the trace does not get to {target_text(target)}")


def target_text(target: Target) -> str:
    return f"event {target.value}" if target.kind == "seq" else f"request {target.value}"


def print_text(report: Report, views: Views) -> None:
    lines = views.shown()
    story = views.story()
    if story is not None:
        lines += story_lines(story)
    if not lines:
        lines = report_lines(report)
    elif report.verdict.exit_code != EXIT_OK:
        lines += verdict_lines(report.header, report.verdict)
    if views.collector is not None:
        lines += stats_lines(views.collector.summary())
    write_lines(lines + views.exports.lines())


def print_object(report: Report, views: Views) -> None:
    fields = report_object(report)
    if views.collector is not None:
        fields["stats"] = views.collector.summary()
    if views.show is not None:
        fields["show"] = views.shown()
    if (story := views.story()) is not None:
        fields["why"] = story
    fields["written"] = views.exports.names
    write_object(fields)
