"""The cursor in a terminal: one key, one step.  Without a terminal: one line, one command."""

import sys
import termios
import tty
from collections.abc import Iterator
from typing import TextIO

from phaseloop.runtime.trace import TraceError
from phaseloop.sim.replay import Step
from phaseloop.sim.replay_cursor import Cursor, TargetError, parse_target
from phaseloop.sim.replay_show import Show, View, show_lines
from phaseloop.sim.replay_story import Storyteller, story_lines
from phaseloop.sim.replay_text import effect_text, event_text, time_text

HELP_LINES = (
    "n, enter   the next event (n 10: ten of them)",
    "b          back one event (b 10: ten)",
    "j PLACE    jump to an event (120), a time (12.5s) or an arrival (req:3)",
    "w ID       why request ID waited, up to here",
    "s u k      the state, the queue, the KV memory here",
    "r ID       where request ID stands here",
    "?          this help",
    "q          quit",
)
END_OF_INPUT = "\x04"  # control-D
ARGUMENT_KEYS = {"j": "to", "w": "request", "r": "request"}
VIEW_KEYS: dict[str, View] = {"s": "state", "u": "queue", "k": "kv"}


def line_commands(source: TextIO) -> Iterator[str]:
    """Commands from a pipe or file, a line each."""
    for line in source:
        yield line.strip()


def key_commands(source: TextIO, out: TextIO) -> Iterator[str]:
    """Commands from a terminal: single keys; those that need a word ask for it."""
    descriptor = source.fileno()
    cooked = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor, termios.TCSADRAIN)  # what was typed ahead is kept
        while (key := source.read(1)) not in ("", END_OF_INPUT):
            if key not in ARGUMENT_KEYS:
                yield key.strip()
                continue
            out.write(f"{ARGUMENT_KEYS[key]}: ")
            out.flush()
            termios.tcsetattr(descriptor, termios.TCSADRAIN, cooked)
            word = source.readline().strip()
            tty.setcbreak(descriptor, termios.TCSADRAIN)
            yield f"{key} {word}"
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, cooked)


class Terminal:
    """Moves a cursor about and prints where it is."""

    def __init__(self, cursor: Cursor, seq: int, out: TextIO) -> None:
        """`seq` is where to begin, -1 for before the first event."""
        self.cursor = cursor
        self.seq = seq
        self.out = out

    def run(self, commands: Iterator[str]) -> None:
        self.print_place()
        for command in commands:
            word, _, argument = command.partition(" ")
            if word == "q":
                return
            try:
                self.obey(word or "n", argument.strip())
            except TargetError as error:
                self.print([str(error)])

    def obey(self, word: str, argument: str) -> None:
        """Raises TargetError for a command, or a place, that does not exist."""
        if word == "n":
            self.move(parse_steps(argument))
        elif word == "b":
            self.move(-parse_steps(argument))
        elif word == "j":
            self.seq = self.cursor.find(parse_target(argument))
            self.print_place()
        elif word == "w":
            self.print(self.story(parse_id(argument)))
        elif word == "r":
            self.show(Show("request", parse_id(argument)))
        elif word in VIEW_KEYS:
            self.show(Show(VIEW_KEYS[word]))
        elif word == "?":
            self.print(HELP_LINES)
        else:
            raise TargetError(f"{word!r} is no command; ? lists them")

    def move(self, count: int) -> None:
        wanted = max(-1, self.seq + count)
        if wanted >= 0 and self.cursor.step(wanted) is None:
            self.seq = self.cursor.end()
            self.print_place()
            self.print([f"the end{end_note(self.cursor)}"])
            return
        if count < 0 and self.seq == -1:
            self.print(["this is the beginning"])
            return
        self.seq = wanted
        self.print_place()

    def show(self, show: Show) -> None:
        step = self.here()
        state = self.cursor.initial if step is None else step.after
        self.print(show_lines(show, state, 0 if step is None else step.event.at_ns))

    def story(self, request_id: int) -> list[str]:
        teller = Storyteller(request_id)
        for seq in range(self.seq + 1):
            step = self.cursor.step(seq)
            if step is not None:
                teller.see(step)
        story = teller.finished()
        if story is None:
            raise TargetError(f"request {request_id} has not arrived yet")
        return story_lines(story)

    def here(self) -> Step | None:
        return None if self.seq < 0 else self.cursor.step(self.seq)

    def print_place(self) -> None:
        step = self.here()
        self.print(["before the first event"] if step is None else step_lines(step))

    def print(self, lines: list[str] | tuple[str, ...]) -> None:
        self.out.write("".join(f"{line}\n" for line in lines))
        self.out.flush()


def step_lines(step: Step) -> list[str]:
    place = f"event {step.seq}, line {step.line}, {time_text(step.event.at_ns)}"
    lines = [f"{place}: {event_text(step.event)}"]
    lines += [f"  -> {effect_text(effect)}" for effect in step.effects] or ["  -> nothing"]
    if step.before.phase != step.after.phase:
        lines.append(f"  phase {step.before.phase} -> {step.after.phase}")
    return lines


def end_note(cursor: Cursor) -> str:
    broken: TraceError | None = cursor.broken
    if broken is not None:
        return f": {broken}"
    found = cursor.fold.divergence
    if found is not None and found.event is not None:
        return f": the replay diverges at line {found.line} ({event_text(found.event)})"
    return ""


def parse_steps(argument: str) -> int:
    return parse_id(argument, "a number of events") if argument else 1


def parse_id(argument: str, wanted: str = "a request's number") -> int:
    digits = argument.removeprefix("req:")
    if not (digits.isascii() and digits.isdigit()) or len(digits) > 18:
        raise TargetError(f"{argument!r} is not {wanted}")
    return int(digits)


def commands_of(source: TextIO, out: TextIO) -> Iterator[str]:
    return key_commands(source, out) if source.isatty() else line_commands(source)


def browse(cursor: Cursor, seq: int) -> None:
    """Until the user has enough."""
    Terminal(cursor, seq, sys.stdout).run(commands_of(sys.stdin, sys.stdout))
