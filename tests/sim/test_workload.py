"""Goal: a workload file means what its comments say, and every mistake in one is named.

Method: all shipped workloads are read; then a file with everything in it; then files with one
mistake each, and the message that names file, key, value and what is allowed.
"""

from pathlib import Path

import pytest

from phaseloop.engine.sim_fields import SettingError
from phaseloop.sim.arrivals import arrivals_of
from phaseloop.sim.workload import Bursts, Poisson, Ramp, read_workload

WORKLOADS = sorted((Path(__file__).parents[2] / "fixtures" / "workloads").glob("*.toml"))


@pytest.mark.parametrize("path", WORKLOADS, ids=lambda path: path.stem)
def test_shipped_workloads_are_sound_and_say_what_they_ask(path):
    workload = read_workload(path)
    assert next(arrivals_of(workload, workload.seed)).request.request_id == 0
    head = path.read_text().split("\n\n[")[0]
    assert all(line.startswith("#") or not line for line in head.splitlines())
    assert "?" in head


def test_the_shipped_set_is_complete():
    assert {path.stem for path in WORKLOADS} >= {
        "agents-shared-prefix",
        "live-mixed",
        "long-stream",
        "many-short",
        "million",
        "open-loop-high",
        "open-loop-low",
        "open-loop-medium",
        "pair",
        "pair-reversed",
    }


def written(tmp_path: Path, content: str) -> Path:
    path = tmp_path / "load.toml"
    path.write_text(content)
    return path


EVERYTHING = """
[run]
seed = 7
count = 100
horizon_s = 600
cut_s = 900.5

[[request]]
at_s = 2.5
prompt = 10

[[stream]]
name = "chat"
arrivals = { kind = "burst", every_s = 60, size = 8, spread_s = 1, from_s = 3, count = 50 }
prompt = { kind = "uniform", low = 10, high = 20 }
output = 5
limit = 9
kind = "completion"
choices = 2
priority = -3
adapter = 4
deadline_s = 60
queue_s_max = 10
stops_before_end = [4, 1028]
prefix = { name = "system", length = 8, families = 4 }
cancel = { fraction = 0.25, after_tokens = 3 }
stall = { fraction = 0.5, after_tokens = 2, for_s = 1.5 }
"""


def test_everything(tmp_path):
    workload = read_workload(written(tmp_path, EVERYTHING))
    request, stream = workload.streams
    assert (workload.name, workload.seed, workload.count) == ("load", 7, 100)
    assert (workload.horizon_ns, workload.cut_ns) == (600 * 10**9, 900_500_000_000)
    assert request.arrivals.pattern.at_ns == (2_500_000_000,)
    assert (request.output, request.limit, request.cancel) == (None, None, None)
    assert stream.arrivals.pattern == Bursts(60 * 10**9, 8, 10**9)
    assert (stream.arrivals.count, stream.arrivals.from_ns) == (50, 3 * 10**9)
    assert (stream.choices, stream.priority, stream.adapter) == (2, -3, 4)
    assert (stream.deadline_ns, stream.queue_ns_max) == (60 * 10**9, 10 * 10**9)
    assert stream.stops_before_end == (1028, 4)
    assert (stream.prefix.name, stream.prefix.length, stream.prefix.families) == ("system", 8, 4)
    assert (stream.cancel.fraction, stream.stall.fraction) == (0.25, 0.5)
    assert stream.stall.for_ns.value == 1_500_000_000


@pytest.mark.parametrize(
    ("arrivals", "pattern"),
    [
        ('{ kind = "poisson", per_s = 2, until_s = 9 }', Poisson(2.0)),
        ('{ kind = "ramp", per_s = [0, 3], over_s = 60, count = 5 }', Ramp(0.0, 3.0, 60 * 10**9)),
    ],
)
def test_patterns(arrivals, pattern, tmp_path):
    path = written(tmp_path, f"[[stream]]\nprompt = 1\narrivals = {arrivals}\n")
    assert read_workload(path).streams[0].arrivals.pattern == pattern


def stream_with(line: str) -> str:
    arrivals = 'arrivals = { kind = "poisson", per_s = 1, count = 9 }'
    return f"[[stream]]\n{arrivals}\nprompt = 5\n{line}\n"


def arriving(arrivals: str) -> str:
    return f"[[stream]]\nprompt = 5\narrivals = {arrivals}\n"


MISTAKES = {
    "nothing in it": ("", r"request is missing: a workload has a \[\[request\]\] or a"),
    "not TOML": ("[run]\nseed = \n", r"not TOML: Invalid value \(at line 2, column 8\)"),
    "no such table": ("[runs]\n", r"runs|request is missing"),
    "unknown table": (stream_with("") + "[runs]\n", r"unknown key 'runs'; did you mean 'run'"),
    "unknown key": (stream_with("promt = 3"), r"stream\[1\]: unknown key 'promt'; did you mean 'p"),
    "request with arrivals": (
        "[[request]]\nprompt = 5\narrivals = 3\n",
        r"request\[1\]: unknown key 'arrivals'",
    ),
    "a request without a prompt": ("[[request]]\nat_s = 1\n", r"request\[1\].prompt is missing"),
    "prompt of nothing": (
        "[[request]]\nprompt = 0\n",
        r"request\[1\].prompt = 0: must be from 1 to 268435456",
    ),
    "prompt of half a token": (
        "[[request]]\nprompt = 1.5\n",
        r"request\[1\].prompt = 1.5: must be an integer",
    ),
    "a text for a number": (
        '[[request]]\nprompt = "many"\n',
        r"request\[1\].prompt = 'many': must be an integer",
    ),
    "second request": (
        "[[request]]\nprompt = 1\n[[request]]\nprompt = -1\n",
        r"request\[2\].prompt = -1",
    ),
    "not an array": ("[request]\nprompt = 1\n", r"request = .*written \[\[request\]\]"),
    "a number for a table": ("run = 3\n", r"run = 3: must be a table"),
    "seed": ("[run]\nseed = -1\n" + stream_with(""), r"run.seed = -1: must be from 0 to"),
    "count": ("[run]\ncount = 0\n" + stream_with(""), r"run.count = 0: must be from 1 to"),
    "horizon": ("[run]\nhorizon_s = 0\n" + stream_with(""), r"run.horizon_s = 0: must be a number"),
    "infinity": ("[run]\ncut_s = inf\n" + stream_with(""), r"run.cut_s = inf: must be a number"),
    "not a number": ("[run]\ncut_s = nan\n" + stream_with(""), r"run.cut_s = nan: must be a num"),
    "kind of request": (stream_with('kind = "chat"'), r"kind = 'chat': must be one of completion"),
    "choices": (stream_with("choices = 0"), r"stream\[1\].choices = 0: must be from 1 to 4096"),
    "deadline": (stream_with("deadline_s = -1"), r"stream\[1\].deadline_s = -1: must be a number"),
    "stops": (stream_with("stops_before_end = [0]"), r"stops_before_end = 0: must hold integers"),
    "no stops": (stream_with("stops_before_end = []"), r"stops_before_end = \[\]: must be a list"),
    "kind of distribution": (
        stream_with('output = { kind = "unifrom", low = 1, high = 2 }'),
        r"stream\[1\].output.kind = 'unifrom': must be one of .*did you mean 'uniform'",
    ),
    "distribution without kind": (
        stream_with("output = { low = 1, high = 2 }"),
        r"stream\[1\].output.kind is missing",
    ),
    "low above high": (
        stream_with('output = { kind = "uniform", low = 9, high = 2 }'),
        r"stream\[1\].output.high = 2: must not be below low = 9",
    ),
    "sigma": (
        stream_with('output = { kind = "lognormal", median = 9, sigma = -1 }'),
        r"stream\[1\].output.sigma = -1: must be a number from 0 to 10",
    ),
    "median": (
        stream_with('output = { kind = "lognormal", median = 0, sigma = 1 }'),
        r"stream\[1\].output.median = 0: must be above 0",
    ),
    "weights too few": (
        stream_with('output = { kind = "choice", values = [1, 2], weights = [1] }'),
        r"stream\[1\].output.weights = \[1.0\]: must be as many as values, 2, not 1",
    ),
    "weights of nothing": (
        stream_with('output = { kind = "choice", values = [1], weights = [0] }'),
        r"weights = \[0.0\]: must not all be 0",
    ),
    "negative weight": (
        stream_with('output = { kind = "choice", values = [1], weights = [-1] }'),
        r"weights = -1: must be a number from 0",
    ),
    "empty values": (
        stream_with('output = { kind = "empirical", values = [] }'),
        r"stream\[1\].output.values = \[\]: must be a list of at least one",
    ),
    "key of another kind": (
        stream_with('output = { kind = "empirical", values = [1], low = 1 }'),
        r"table stream\[1\].output: unknown key 'low'",
    ),
    "arrivals missing": ("[[stream]]\nprompt = 1\n", r"stream\[1\].arrivals is missing"),
    "arrivals kind": (arriving('{ kind = "poison" }'), r"did you mean 'poisson'"),
    "rate": (arriving('{ kind = "poisson", per_s = 0 }'), r"arrivals.per_s = 0: must be a number"),
    "ramp of three": (
        arriving('{ kind = "ramp", per_s = [1, 2, 3], over_s = 1 }'),
        r"arrivals.per_s = \[1.0, 2.0, 3.0\]: must be two rates",
    ),
    "ramp of nothing": (
        arriving('{ kind = "ramp", per_s = [0, 0], over_s = 1 }'),
        r"arrivals.per_s = \[0.0, 0.0\]: must be two rates",
    ),
    "burst size": (
        arriving('{ kind = "burst", every_s = 1, size = 0 }'),
        r"arrivals.size = 0: must be from 1",
    ),
    "bursts that overlap": (
        arriving('{ kind = "burst", every_s = 1, size = 2, spread_s = 3 }'),
        r"arrivals.spread_s = 3: must be a number from 0 to 1",
    ),
    "until before from": (
        arriving('{ kind = "poisson", per_s = 1, from_s = 9, until_s = 5 }'),
        r"arrivals.until_s = 5: must be later than from_s = 9",
    ),
    "times before the start": (
        arriving('{ kind = "list", at_s = [-1] }'),
        r"arrivals.at_s = -1: must be a number from 0",
    ),
    "until for a list": (
        arriving('{ kind = "list", at_s = [1], until_s = 3 }'),
        r"table stream\[1\].arrivals: unknown key 'until_s'",
    ),
    "without an end": (
        arriving('{ kind = "poisson", per_s = 1 }'),
        r"stream\[1\].arrivals.until_s is missing: nothing ends this stream",
    ),
    "cancel without a when": (
        stream_with("cancel = { fraction = 0.5 }"),
        r"cancel.after_s or after_tokens is missing",
    ),
    "cancel with both": (
        stream_with("cancel = { after_s = 1, after_tokens = 1 }"),
        r"cancel.after_tokens = 1: cannot stand with after_s",
    ),
    "fraction": (
        stream_with("cancel = { fraction = 1.5, after_s = 1 }"),
        r"stream\[1\].cancel.fraction = 1.5: must be a number from 0 to 1",
    ),
    "stall": (stream_with("stall = { after_tokens = 3 }"), r"stall.for_s is missing"),
    "families": (
        stream_with("prefix = { length = 3, families = 0 }"),
        r"prefix.families = 0: must be from 1",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named(mistake, tmp_path):
    content, message = MISTAKES[mistake]
    path = written(tmp_path, content)
    with pytest.raises(SettingError, match=message) as error:
        read_workload(path)
    assert str(error.value).startswith(f"{path}: ")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(SettingError, match=r"none.toml: No such file"):
        read_workload(tmp_path / "none.toml")


def test_bytes_that_are_no_text_are_named(tmp_path):
    path = tmp_path / "load.toml"
    path.write_bytes(b"[run]\nseed = 1 # \xff\n")
    with pytest.raises(SettingError, match=r"load.toml: not UTF-8 at byte 17"):
        read_workload(path)
