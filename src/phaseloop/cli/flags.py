"""Command lines in llama-server's manner: a table of flags, their environment, what to say of each.

A flag is *used*, *ignored* (known, but without meaning here: one warning) or *refused* (what it
asks for cannot be had).  Start scripts written for llama-server must run unchanged, or fail with a
sentence that says why.

Rules of reading.  Flags begin with `-` and are matched whole, so `-np` is not `-n p`.  `_` in a
long flag counts as `-`.  A value is the next word, whatever it begins with; a long flag may also
bring it along as `--flag=value`.  Of a flag given twice the last counts, unless it collects.  The
command line wins over the environment.
"""

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, TypeAlias, cast

from msgspec import Struct

from .errors import UserError

Values: TypeAlias = tuple[object, ...]
Status: TypeAlias = Literal["used", "ignored", "refused"]
TRUE, FALSE = ("on", "enabled", "true", "1"), ("off", "disabled", "false", "0")
OWN_PREFIX, FOREIGN_PREFIX = "PHASELOOP_", "LLAMA_ARG_"


class Kind(Struct, frozen=True):
    """How a flag's words become its value."""

    metavar: str  # of the help; empty for a switch
    read: Callable[[str], object]  # raises ValueError, whose text says what is possible
    words: int = 1  # how many it takes
    alone: str | None = None  # what it means without a value, where it may stand without one


class Flag(Struct, frozen=True):
    """`names`: the spellings that set it, the clearest one last; `off`: those that unset it.

    `fine`: values of a flag that is ignored or refused which ask for nothing out of the way.
    """

    names: tuple[str, ...]
    kind: Kind
    about: str = ""  # what it does; of one that is ignored or refused, why
    field: str = ""  # of the settings; empty unless used
    env: str = ""
    off: tuple[str, ...] = ()
    status: Status = "used"
    collects: bool = False
    fine: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.names[-1]


class Group(Struct, frozen=True):
    title: str
    flags: tuple[Flag, ...]


class Parsed(Struct, frozen=True):
    """Values by field, and what the user should know."""

    values: dict[str, object]
    warnings: tuple[str, ...]
    given: frozenset[str]  # names of the flags that were set, by command line or environment


def used(
    names: str,
    kind: Kind,
    field: str,
    about: str = "",
    *,
    env: str = "",
    off: str = "",
    collects: bool = False,
) -> Flag:
    return Flag(
        tuple(names.split()), kind, about, field, env, tuple(off.split()), collects=collects
    )


def own(name: str, kind: Kind, about: str, off: str = "") -> Flag:
    """A flag that only phaseloop has: field and variable follow from its name."""
    field = name.replace("-", "_")
    return used(f"--{name}", kind, field, about, env=OWN_PREFIX + field.upper(), off=off)


# --- kinds ----------------------------------------------------------------------------------------


def integer(low: int, high: int) -> Kind:
    return Kind("N", lambda text: bounded(number(text, int, "an integer"), low, high))


def fraction(low: float, high: float) -> Kind:
    return Kind("X", lambda text: bounded(number(text, float, "a number"), low, high))


def number(text: str, kind: Callable[[str], float], noun: str) -> float:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"not {noun}") from None


def bounded(value: float, low: float, high: float) -> float:
    if not low <= value <= high:  # NaN is outside, too
        raise ValueError(f"possible are {low} to {high}")
    return value


def one_of(*values: str, metavar: str = "") -> Kind:
    return Kind(metavar or f"{{{','.join(values)}}}", lambda text: chosen(text, values))


def chosen(text: str, values: Sequence[str]) -> str:
    if text not in values:
        raise ValueError(f"possible are {', '.join(values)}{nearest(text, values)}")
    return text


def text(metavar: str = "TEXT") -> Kind:
    return Kind(metavar, str)


def text_list(metavar: str = "A,B") -> Kind:
    return Kind(metavar, listed)


def listed(text: str) -> tuple[str, ...]:
    """What stands between commas; empty parts are none."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def keys(text: str) -> tuple[str, ...]:
    """An empty one is as a rule a variable of a shell that was never set."""
    found = listed(text)
    if not found:
        raise ValueError("it holds no key, and the API would be open to all; leave it out for that")
    return found


def prefix(text: str) -> str:
    if text and (not text.startswith("/") or set(text) & set(" ?#")):
        raise ValueError("the beginning of a path is expected, as in /api")
    return text


def truth(text: str) -> bool:
    if text in TRUE:
        return True
    if text in FALSE:
        return False
    raise ValueError(f"possible are {', '.join(TRUE)} and {', '.join(FALSE)}")


SWITCH = Kind("", truth, words=0)


def on_off_auto(text: str) -> str:
    if text in ("auto", "-1"):
        return "auto"
    try:
        return "on" if truth(text) else "off"
    except ValueError as error:
        raise ValueError(f"{error}, or auto") from None


MAYBE = Kind("[on|off|auto]", on_off_auto, alone="on")


def nearest(name: str, names: Iterable[str], prefix: str = "") -> str:
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=0.75)
    return f"; did you mean {prefix}{near[0]}?" if near else ""


# --- reading --------------------------------------------------------------------------------------


class Reader:
    """Takes the environment, then the command line, and remembers what to warn about."""

    def __init__(self, groups: Sequence[Group], environment: Mapping[str, str]) -> None:
        self.flags = [flag for group in groups for flag in group.flags]
        self._by_name = {name: flag for flag in self.flags for name in (*flag.names, *flag.off)}
        self._values: dict[str, object] = {}
        self._warnings: list[str] = []
        self._given: set[str] = set()
        self._read_environment(environment)

    def read(self, arguments: Sequence[str]) -> Parsed:
        """Raises UserError."""
        typed: set[str] = set()  # fields; the first use replaces what the environment said
        at = 0
        while at < len(arguments):
            word, joined = split_word(arguments[at])
            flag = self._by_name.get(word)
            if flag is None:
                raise UserError(self._unknown(arguments[at]))
            at += 1
            words = [joined] if joined is not None else list(arguments[at : at + flag.kind.words])
            words = self._checked(flag, word, words, was_joined=joined is not None)
            at += 0 if joined is not None else len(words)
            if flag.field not in typed:
                self._values.pop(flag.field, None)
            typed.add(flag.field)
            self._set(flag, word, words)
        return Parsed(self._values, tuple(dict.fromkeys(self._warnings)), frozenset(self._given))

    def _checked(self, flag: Flag, word: str, words: list[str], *, was_joined: bool) -> list[str]:
        """The words that belong to the flag."""
        kind = flag.kind
        if not kind.words:
            if was_joined:
                raise UserError(f"{word} takes no value")
            return []
        if kind.alone is not None and not was_joined and not self._is_value(kind, words):
            return []
        if len(words) < kind.words:
            raise UserError(f"{word} wants {kind.metavar} after it; see phaseloop serve --help")
        return words

    def _is_value(self, kind: Kind, words: list[str]) -> bool:
        if not words:
            return False
        try:
            kind.read(words[0])
        except ValueError:
            return words[0] not in self._by_name and not words[0].startswith("-")
        return True

    def _read_environment(self, environment: Mapping[str, str]) -> None:
        for flag in self.flags:
            if not flag.env:
                continue
            negated = flag.env.replace(FOREIGN_PREFIX, f"{FOREIGN_PREFIX}NO_")
            if flag.off and negated != flag.env and environment.get(negated):
                self._set(flag, negated, ["off"])
            elif environment.get(flag.env):  # an empty one is as good as none
                self._set(flag, flag.env, [environment[flag.env]])
        known = {flag.env for flag in self.flags}
        for name in sorted(environment):
            if name.startswith(FOREIGN_PREFIX) and name not in known:
                positive = name.replace(f"{FOREIGN_PREFIX}NO_", FOREIGN_PREFIX)
                if positive not in known:
                    shorts = [one.removeprefix(FOREIGN_PREFIX) for one in known]
                    hint = nearest(name.removeprefix(FOREIGN_PREFIX), shorts, FOREIGN_PREFIX)
                    self._warnings.append(f"{name} is set, and no flag reads it{hint}")

    def _set(self, flag: Flag, word: str, words: list[str]) -> None:
        """`word` is how the user named it: a spelling of the flag, or its variable."""
        value = read_value(flag, word, words)
        self._given.add(flag.name)
        if flag.status == "used":
            before = self._values.get(flag.field, ())
            if flag.collects:
                value = (*cast(Values, before), *cast(Values, value))
            self._values[flag.field] = value
            return
        asked = str(value).lower() if flag.kind in (SWITCH, MAYBE) else words[0]
        if asked in flag.fine or (value is False and not flag.off):
            return
        if flag.status == "refused":
            raise UserError(f"{word} is not supported by phaseloop: {flag.about}")
        self._warnings.append(f"{word} has no effect: {flag.about}")

    def _unknown(self, word: str) -> str:
        if not word.startswith("-"):
            return f"{word!r} is no flag; a model is named with -m"
        return f"no flag {word}{nearest(word, self._by_name)} (see phaseloop serve --help)"


def split_word(word: str) -> tuple[str, str | None]:
    """The flag as the table spells it, and a value that came with it."""
    if not word.startswith("--"):
        return word, None
    name, equals, value = word.partition("=")
    return name.replace("_", "-"), value if equals else None


def read_value(flag: Flag, word: str, words: list[str]) -> object:
    kind = flag.kind
    if not kind.words:
        is_on = word not in flag.off
        if words:  # from the environment
            is_on = in_words(kind, word, words[0]) is True
        return is_on
    if not words:
        assert kind.alone is not None
        return kind.read(kind.alone)
    return in_words(kind, word, words[0])


def in_words(kind: Kind, word: str, text: str) -> object:
    try:
        return kind.read(text)
    except ValueError as error:
        raise UserError(f"{word} {text!r}: {error}") from None
