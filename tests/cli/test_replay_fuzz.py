"""Goal: whatever a file holds, `phaseloop replay` says what is wrong with it and never breaks.

Method: a small trace with calls, cancels, children, a failure and a shutdown is cut at every byte,
has bytes changed, lines moved and values replaced at seeded places, and is put through every way of
looking at it.  The exit code must be a documented one, 0 only where the file still says the same,
and nothing may be raised.
"""

import json
import random
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from phaseloop.cli.main import main
from phaseloop.core.policy import PRESETS
from phaseloop.core.state import Limits, initial
from phaseloop.core.vocabulary import (
    ClientStalled,
    Request,
    RequestArrived,
    RequestCancelled,
    ShutdownRequested,
)
from phaseloop.engine.sim_cost import Cost
from phaseloop.runtime.digest import core_digest
from phaseloop.runtime.trace import Header, Reader, TraceError, TraceWriter
from phaseloop.sim.replay import Fold
from phaseloop.sim.replay_scenario import Answer, Scenario
from phaseloop.sim.replay_whatif import summary_of

MS = 1_000_000
LIMITS = Limits(slot_count=3, batch_tokens=64, context_length=4096, page_count=64)
COST = Cost(prefill_token_ns=MS, decode_round_ns=20 * MS, sample_lane_ns=5 * MS)
INPUTS = (
    RequestArrived(at_ns=0, requests=(Request(0, 30, output_limit=3), Request(1, 90))),
    RequestArrived(at_ns=40 * MS, requests=(Request(2, 20, output_limit=2, choices=2),)),
    ClientStalled(at_ns=200 * MS, request_id=1),
    RequestArrived(at_ns=210 * MS, requests=(Request(3, 40, deadline_after_ns=MS),)),
    RequestCancelled(at_ns=300 * MS, request_id=2),
    ShutdownRequested(at_ns=320 * MS),
)
SCENARIO = Scenario(LIMITS, PRESETS["barrier-fair"], INPUTS, (Answer(0, fails_at=33),))
EVERYTHING = ("--stats", "--csv", "{}/o.csv", "--perfetto", "{}/o.json", "--redact", "{}/o.jsonl")


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("trace") / "t.jsonl"
    header = Header(
        version="0", core=core_digest(), policy=SCENARIO.policy, limits=LIMITS, engine="tests"
    )
    with path.open("wb") as out:
        writer = TraceWriter(out, header, initial(LIMITS, SCENARIO.policy))
        summary_of(SCENARIO, COST, (writer.append,))
        writer.close("shutdown", 0)
    return path.read_bytes()


def replay(tmp_path: Path, content: bytes, *options: str) -> int:
    path = tmp_path / "t.jsonl"
    path.write_bytes(content)
    return main(["replay", str(path), *(option.format(tmp_path) for option in options)])


def test_the_trace_itself(content: bytes, tmp_path: Path):
    assert replay(tmp_path, content, "--check", "--twice", *EVERYTHING) == 0
    assert content.count(b"\n") > 20


def test_cut_at_every_byte(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Through the command only around the ends of lines, where it differs; it takes its time."""
    header_end = content.index(b"\n") + 1
    for length in range(len(content)):
        part = content[:length]
        line = part.count(b"\n") + 1
        is_torn = not part.endswith(b"\n")
        if length < header_end:
            with pytest.raises(TraceError, match="line 1: no header"):
                Reader(tmp_path, BytesIO(part))
        else:
            fold = Fold(Reader(tmp_path, BytesIO(part)))
            steps = list(fold)
            assert fold.verdict().torn_line == (line if is_torn else None)
            whole = part[: part.rindex(b"\n")]
            assert len(steps) == whole.count(b'"line":"event"')
        if b"\n" in content[max(0, length - 2) : length + 2]:
            code = replay(tmp_path, part)
            assert code == (2 if length < header_end else 0)
            assert (f"line {line} is torn" in capsys.readouterr().out) == (code == 0 and is_torn)


def says_the_same(one: bytes, two: bytes) -> bool:
    """Only a last newline may be missing: the footer is torn then, and the rest still stands."""
    return one == two or one.rstrip(b"\n") == two.rstrip(b"\n") or one[:-1] == two[:-1]


def spoil_bytes(content: bytes, draws: random.Random) -> bytes:
    spoilt = bytearray(content)
    for _ in range(draws.choice([1, 1, 1, 2, 5])):
        at = draws.randrange(len(spoilt))
        match draws.randrange(4):
            case 0:
                spoilt[at] = draws.randrange(256)
            case 1:
                spoilt[at] ^= 1 << draws.randrange(8)
            case 2:
                del spoilt[at : at + draws.randrange(1, 20)]
            case _:
                spoilt[at:at] = bytes(draws.choice(b'0123456789{}[]",:\n-eE. ') for _ in range(3))
    return bytes(spoilt)


@pytest.mark.parametrize("seed", range(200))
def test_bytes_changed(content: bytes, tmp_path: Path, seed: int):
    draws = random.Random(seed)
    spoilt = spoil_bytes(content, draws)
    code = replay(tmp_path, spoilt)
    assert code in (1, 2, 3) or (code == 0 and says_the_same(spoilt, content))
    if seed % 3 == 0:
        assert replay(tmp_path, spoilt, "--force", *EVERYTHING) in (0, 1, 2, 3)


def spoil_lines(content: bytes, draws: random.Random) -> bytes:
    """Whole lines, each still well formed, that are moved, dropped or doubled."""
    lines = content.splitlines(keepends=True)
    one, two = sorted(draws.sample(range(1, len(lines)), 2))
    match draws.randrange(4):
        case 0:
            lines[one], lines[two] = lines[two], lines[one]
        case 1:
            del lines[one]
        case 2:
            lines.insert(two, lines[one])
        case _:
            lines.insert(one, lines[0])
    return b"".join(lines)


@pytest.mark.parametrize("seed", range(40))
def test_lines_moved(content: bytes, tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]):
    spoilt = spoil_lines(content, random.Random(seed))
    assert replay(tmp_path, spoilt) == 2
    assert "line " in capsys.readouterr().err


VALUES: list[Any] = [0, 1, -1, 7, 10**9, 2**63, 10**30, -(10**30), 1.5, True, None, "", "x", [], {}]


def spoil_value(content: bytes, draws: random.Random) -> bytes:
    """One value somewhere in a line replaced by another; the line stays as phaseloop writes it."""
    lines = content.splitlines()
    number = draws.randrange(len(lines))
    record = json.loads(lines[number])
    places = list(places_of(record))
    holder, key = draws.choice(places)
    holder[key] = draws.choice(VALUES)
    lines[number] = json.dumps(record, separators=(",", ":")).encode()
    return b"\n".join(lines) + b"\n"


def places_of(value: Any):
    keys = value if isinstance(value, dict) else range(len(value))
    for key in list(keys):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from places_of(value[key])


@pytest.mark.parametrize("seed", range(150))
def test_values_replaced(content: bytes, tmp_path: Path, seed: int):
    spoilt = spoil_value(content, random.Random(seed))
    code = replay(tmp_path, spoilt)
    assert code in (1, 2, 3) or (code == 0 and spoilt == content)
    options = ("--force", "--check", "--twice", "--why", "req:1", "--show", "req:2", *EVERYTHING)
    assert replay(tmp_path, spoilt, *options) in (0, 1, 2, 3)


NUMBERS = [0, 1, 2, 3, 5, 63, 64, 65, 4095, 4096, 10**9, 2**62, 2**63 - 1, -1, -(10**9)]


@pytest.mark.parametrize("seed", range(150))
def test_numbers_of_events_replaced(content: bytes, tmp_path: Path, seed: int):
    """Well formed and in order, so that the reducer sees every one of them."""
    draws = random.Random(seed)
    lines = content.splitlines()
    number = draws.choice([i for i, line in enumerate(lines) if b'"line":"event"' in line])
    record = json.loads(lines[number])
    places = [(h, k) for h, k in places_of(record["event"]) if type(h[k]) is int and k != "at_ns"]
    if not places:
        return
    holder, key = draws.choice(places)
    before, holder[key] = holder[key], draws.choice(NUMBERS)
    lines[number] = json.dumps(record, separators=(",", ":")).encode()
    spoilt = b"\n".join(lines) + b"\n"
    assert replay(tmp_path, spoilt) == (0 if holder[key] == before else 1)
    options = ("--force", "--check", "--twice", "--why", "req:1", "--show", "kv", *EVERYTHING)
    assert replay(tmp_path, spoilt, *options) in (0, 1, 2), "2: request 1 is not there"


@pytest.mark.parametrize("seed", range(25))
def test_values_replaced_and_the_run_made_again(content: bytes, tmp_path: Path, seed: int):
    """What does not replay is refused, unless forced; then it may be anything, but not break."""
    spoilt = spoil_value(content, random.Random(1000 + seed))
    if spoilt == content:
        return
    options = ("--what-if", "policy=mixed", "--cost", "cpu-smollm2")
    assert replay(tmp_path, spoilt, *options) in (1, 2, 3)
    assert replay(tmp_path, spoilt, *options, "--force") in (0, 1, 2, 3)
    assert replay(tmp_path, spoilt, "--inject", "slow=2x@3", "--force") in (0, 1, 2, 3)


@pytest.mark.parametrize(
    "junk", [b"", b"\n", b"\x00" * 50, b"[]\n", b"{}\n", b"\xff\xfe\n", b"[" * 100_000 + b"\n"]
)
def test_no_trace_at_all(tmp_path: Path, junk: bytes, capsys: pytest.CaptureFixture[str]):
    assert replay(tmp_path, junk) == 2
    assert capsys.readouterr().err.startswith("phaseloop: ")
