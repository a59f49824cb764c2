"""What goes wrong on purpose, and when: written as WHAT@WHEN, counted in rounds or in time.

lane@120      the first lane of round 120 fails (rounds are numbered from 0)
lane@120.2    its third lane fails
round@100-109 rounds 100 to 109 fail as a whole
engine@12.5s  the engine is lost with the first round launched at 12.5 s or later
round@1%      each round fails with a chance of 1 %, drawn from the seed and its number
3x@10s-20s    rounds launched from 10 s to before 20 s take three times as long
"""

import re
from typing import Literal, TypeAlias

from msgspec import Struct

from .sim_draws import draw
from .sim_fields import SECONDS_MAX, SettingError, nanoseconds

FACTOR_MAX = 1_000_000
PPM = 1_000_000
FAULT_KEY = 2

What: TypeAlias = Literal["lane", "round", "engine"]


class Rounds(Struct, frozen=True):
    """Rounds `first` to `last`; `lane` counts from 0."""

    first: int
    last: int
    lane: int = 0


class Times(Struct, frozen=True):
    """Rounds launched in [start_ns, stop_ns); with `once` only the first of them."""

    start_ns: int
    stop_ns: int
    once: bool = False


class Chance(Struct, frozen=True):
    per_million: int


When: TypeAlias = Rounds | Times | Chance


class Failure(Struct, frozen=True):
    what: What
    when: When


class Slowness(Struct, frozen=True):
    factor_ppm: int
    when: When


class Struck(Struct, frozen=True):
    """What befalls one round."""

    factor_ppm: int = PPM
    engine: bool = False
    round: bool = False
    lanes: tuple[int, ...] = ()


UNHARMED = Struck()


class Faults:
    """Decides round by round.  Remembers which one-time faults have struck."""

    def __init__(
        self, failures: tuple[Failure, ...] = (), slownesses: tuple[Slowness, ...] = ()
    ) -> None:
        self._faults: tuple[Failure | Slowness, ...] = (*failures, *slownesses)
        self._spent: list[int] = []

    def at(self, seed: int, round_id: int, now_ns: int) -> Struck:
        """Ask once per round, in order."""
        if not self._faults:
            return UNHARMED
        factor_ppm = PPM
        whats: list[What] = []
        lanes: list[int] = []
        for index, fault in enumerate(self._faults):
            if not self._strikes(index, fault.when, seed, round_id, now_ns):
                continue
            if isinstance(fault, Slowness):
                factor_ppm = factor_ppm * fault.factor_ppm // PPM
            elif fault.what == "lane":
                lanes.append(fault.when.lane if isinstance(fault.when, Rounds) else 0)
            else:
                whats.append(fault.what)
        return Struck(factor_ppm, "engine" in whats, "round" in whats, tuple(lanes))

    def _strikes(self, index: int, when: When, seed: int, round_id: int, now_ns: int) -> bool:
        match when:
            case Rounds():
                return when.first <= round_id <= when.last
            case Chance():
                return draw(FAULT_KEY, seed, index, round_id) % PPM < when.per_million
            case Times():
                if not when.start_ns <= now_ns < when.stop_ns or index in self._spent:
                    return False
                if when.once:
                    self._spent.append(index)
                return True


def parse_failure(spec: str) -> Failure:
    """Raises SettingError with the grammar."""
    what, _, when = spec.partition("@")
    if what == "lane" or what == "round" or what == "engine":
        return Failure(what, parse_when(spec, when))
    raise SettingError(
        f"--fail {spec!r}: must be lane@WHEN, round@WHEN or engine@WHEN, such as round@120"
    )


def parse_slowness(spec: str) -> Slowness:
    """Raises SettingError with the grammar."""
    factor, _, when = spec.partition("@")
    found = re.fullmatch(r"(\d+(?:\.\d+)?)x", factor)
    if found is None or not 0 < float(found[1]) <= FACTOR_MAX:
        must = f"must be FACTORx@WHEN, the factor above 0 and at most {FACTOR_MAX}"
        raise SettingError(f"--slow {spec!r}: {must}, such as 3x@10s-20s")
    return Slowness(max(1, round(float(found[1]) * PPM)), parse_when(spec, when))


ROUNDS = re.compile(r"(\d{1,15})(?:-(\d{1,15})|\.(\d{1,9}))?")
TIMES = re.compile(r"(\d+(?:\.\d+)?)s(?:-(\d+(?:\.\d+)?)s)?")
CHANCE = re.compile(r"(\d+(?:\.\d+)?)%")


def parse_when(spec: str, when: str) -> When:
    if found := ROUNDS.fullmatch(when):
        first, last = int(found[1]), int(found[2] or found[1])
        if first <= last and (found[3] is None or spec.startswith("lane@")):
            return Rounds(first, last, int(found[3] or 0))
    elif found := TIMES.fullmatch(when):
        start, stop = float(found[1]), float(found[2] or SECONDS_MAX)
        if start < stop <= SECONDS_MAX:
            return Times(nanoseconds(start), nanoseconds(stop), once=found[2] is None)
    elif (found := CHANCE.fullmatch(when)) and float(found[1]) <= 100:
        return Chance(round(float(found[1]) * 10_000))
    raise SettingError(
        f"{spec!r}: after the @ comes a round (120), its lane (lane@120.2), rounds (100-109), "
        f"a time (12.5s), a stretch of time (10s-20s) or a chance per round (0.1%)"
    )
