"""Goal: a fault strikes the rounds its text names and no other.

Method: texts against the rounds they hit; texts that are none against the message.
"""

import pytest

from phaseloop.engine.sim_faults import Faults, Struck, parse_failure, parse_slowness
from phaseloop.engine.sim_fields import SettingError

S = 1_000_000_000


def struck_rounds(spec: str, rounds: int = 20, seed: int = 0) -> list[int]:
    """Rounds are launched one a second."""
    faults = Faults((parse_failure(spec),))
    return [n for n in range(rounds) if faults.at(seed, n, n * S) != Struck()]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("round@3", [3]),
        ("round@3-5", [3, 4, 5]),
        ("lane@7", [7]),
        ("lane@7.2", [7]),
        ("engine@0", [0]),
        ("round@4.5s", [5]),
        ("round@4s", [4]),
        ("round@4s-6s", [4, 5]),
        ("round@0.5s-0.9s", []),
        ("round@100%", list(range(20))),
        ("round@0%", []),
    ],
)
def test_when(spec, expected):
    assert struck_rounds(spec) == expected


def test_what():
    def struck(spec: str) -> Struck:
        return Faults((parse_failure(spec),)).at(0, 7, 0)

    assert struck("lane@7.2") == Struck(lanes=(2,))
    assert struck("lane@7") == Struck(lanes=(0,))
    assert struck("round@7") == Struck(round=True)
    assert struck("engine@7") == Struck(engine=True)


def test_a_chance_is_drawn_per_round_and_seed():
    struck = struck_rounds("round@10%", rounds=5000)
    assert 400 < len(struck) < 600
    assert struck == struck_rounds("round@10%", rounds=5000)
    assert struck != struck_rounds("round@10%", rounds=5000, seed=1)


def test_slowness_multiplies():
    faults = Faults((), (parse_slowness("3x@5"), parse_slowness("0.5x@4-6")))
    assert [faults.at(0, n, 0).factor_ppm for n in range(3, 8)] == [
        1_000_000,
        500_000,
        1_500_000,
        500_000,
        1_000_000,
    ]


def test_several_faults_of_one_round_add_up():
    faults = Faults((parse_failure("lane@2"), parse_failure("lane@2.1"), parse_failure("round@2")))
    assert faults.at(0, 2, 0) == Struck(round=True, lanes=(0, 1))


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "round",
        "round@",
        "round@x",
        "round@-1",
        "round@5-3",
        "round@3.1",
        "round@101%",
        "round@9s-3s",
        "gpu@3",
        "lane@1.2.3",
    ],
)
def test_what_is_no_failure_says_how_one_is_written(spec):
    with pytest.raises(SettingError, match=r"round@120|\(120\)") as error:
        parse_failure(spec)
    assert repr(spec) in str(error.value)


@pytest.mark.parametrize("spec", ["3@5", "x@5", "0x@5", "9999999x@5", "-2x@5", "3x", "3x@lots"])
def test_what_is_no_slowness_says_how_one_is_written(spec):
    with pytest.raises(SettingError, match=r"3x@10s-20s|10s-20s") as error:
        parse_slowness(spec)
    assert repr(spec) in str(error.value)
