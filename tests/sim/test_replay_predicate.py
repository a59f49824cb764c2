"""Goal: a predicate means what it says, and whatever is none is refused with a column.

Method: a table of texts, and random expressions compared with Python's own evaluation of them.
"""

import math
import random

import pytest

from phaseloop.sim.metrics import Collector
from phaseloop.sim.replay_figures import figures_of
from phaseloop.sim.replay_predicate import PredicateError, parse_predicate

FIGURES = {"gap_max_ms": 640.0, "rounds": 12.0, "failed": 0.0, "ttft_p50_s": math.nan}
NAMES = tuple(FIGURES)


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("gap_max_ms>500", True),
        ("gap_max_ms > 640", False),
        ("gap_max_ms >= 640", True),
        ("gap_max_ms<=639.999", False),
        ("failed==0", True),
        ("failed != 0", False),
        ("not failed == 0", False),
        ("not not failed == 0", True),
        ("failed == 1 or rounds == 12", True),
        ("failed == 1 and rounds == 12", False),
        ("failed == 1 and rounds == 12 or rounds == 12", True),
        ("failed == 1 and (rounds == 12 or rounds == 12)", False),
        ("not (failed == 1 or rounds < 12)", True),
        ("rounds > .5", True),
        ("ttft_p50_s > 0", False),
        ("ttft_p50_s <= 0", False),
    ],
)
def test_what_it_means(text: str, holds: bool):
    assert parse_predicate(text, NAMES)(FIGURES) is holds


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "ends where it needs one of gap_max_ms"),
        ("gap_max_ms", "ends where it needs one of >"),
        ("gap_max_ms >", "ends where it needs a number"),
        ("gap_max > 5", "column 1: 'gap_max' is not one of gap_max_ms"),
        ("rounds > 5 failed > 1", "column 12: 'failed' is not 'and', 'or' or the end"),
        ("rounds > rounds", "column 10: 'rounds' is not a number"),
        ("(rounds > 5", r"ends where it needs '\)'"),
        ("rounds > 5)", r"column 11: '\)' is not"),
        ("rounds > .", r"column 10: '\.' is not a number"),
        ("rounds > 5..", r"column 12: '\.' is not 'and'"),
        ("rounds > \u0663", "column 10: '\u0663' is not a number"),
        ("rounds = 5", "column 8: '=' is not one of > >="),
        ("__import__('os')", "column 1: '__import__' is not one of"),
        ("(" * 200 + "rounds > 1" + ")" * 200, "nested more than 50 deep"),
        ("not " * 5000 + "rounds > 1", "nested more than 50 deep"),
    ],
)
def test_what_is_none(text: str, message: str):
    with pytest.raises(PredicateError, match=message):
        parse_predicate(text, NAMES)


def test_random_expressions_agree_with_python():
    draws = random.Random(4)

    def expression(depth: int) -> str:
        kind = draws.randrange(6 if depth else 1)
        if kind < 3:
            operator = draws.choice(["<", ">", "<=", ">=", "==", "!="])
            name = draws.choice(["gap_max_ms", "rounds", "failed"])
            return f"{name} {operator} {draws.choice([0, 1, 12, 640, 12.5])}"
        if kind == 3:
            return f"not ({expression(depth - 1)})"
        word = "and" if kind == 4 else "or"
        return f"({expression(depth - 1)}) {word} {expression(0)}"

    seen: set[bool] = set()
    for _ in range(300):
        text = expression(4)
        expected = eval(text, {}, dict(FIGURES))
        assert parse_predicate(text, NAMES)(FIGURES) is expected, text
        seen.add(expected)
    assert seen == {True, False}


def test_figures_have_seconds_and_milliseconds():
    from recordings import LIMITS, PRESETS  # the summary of a run without events

    figures = figures_of(Collector(LIMITS, PRESETS["mixed"]).summary())
    assert {"gap_max_s", "gap_max_ms", "ttft_p95_ms", "makespan_ms", "rounds"} <= set(figures)
    assert "policy" not in figures and "tokens_per_s" in figures and "tokens_per_ms" not in figures
    assert math.isnan(figures["gap_max_ms"]) and figures["rounds"] == 0
