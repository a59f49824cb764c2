"""Goal: what docs/policy.md says of codes, promises and figures is so, or a test names the row.

Method: its tables are compared with the source, and its example is simulated again.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
from msgspec.structs import fields, replace
from pages import DOCS, ROOT, codes, table

from phaseloop.core import invariants, vocabulary
from phaseloop.core.explain import REASONS
from phaseloop.core.policy import DEFAULT as DEFAULT_POLICY
from phaseloop.core.policy import MS, PRESETS
from phaseloop.core.state import Limits, State
from phaseloop.core.vocabulary import (
    AnyEvent,
    DeliverTokens,
    Effects,
    Policy,
    RoundCompleted,
    SeatRequest,
)
from phaseloop.engine.protocol import limits_of
from phaseloop.engine.sim import describe
from phaseloop.engine.sim_presets import DEFAULT
from phaseloop.engine.sim_presets import PRESETS as ENGINES
from phaseloop.sim.arrivals import arrivals_of
from phaseloop.sim.workload import read_workload
from phaseloop.sim.world import Scene, simulate

POLICY = (DOCS / "policy.md").read_text()
SECOND = 1_000_000_000

# --- codes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["LaunchReason", "SeatReason", "ReleaseReason", "FinishReason"])
def test_every_code_is_documented(name):
    assert tuple(codes(table(POLICY, name))) == get_args(getattr(vocabulary, name))


def test_every_reason_to_wait_is_documented():
    rows = table(POLICY, "waits")
    assert {code: row[1] for code, row in zip(codes(rows), rows, strict=True)} == documented()


def documented() -> dict[str, str]:
    """As the source has it, but for `no_pages`, of which the page says more."""
    more = "; or it generates and there is none to grow into"
    return {code: text + more * (code == "no_pages") for code, text in REASONS.items()}


# --- promises -------------------------------------------------------------------------------------


def test_each_preset_promises_what_the_page_says():
    rows = table(POLICY, "presets")
    assert [row[0].strip("`") for row in rows] == list(PRESETS)
    for row, policy in zip(rows, PRESETS.values(), strict=True):
        assert tuple(row[3].split()) == invariants.promises(policy)


def test_settings_have_the_defaults_that_the_page_says():
    quantum = PRESETS["quantum"]
    limits = {field.name: field.default for field in fields(Limits)}
    defaults = {
        "--policy": DEFAULT_POLICY,
        "--pp-quantum-ms": quantum.prefill_quantum_ns // MS,
        "--tg-quantum-ms": quantum.decode_quantum_ns // MS,
        "--seat-quantum-ms": quantum.seat_quantum_ns // MS,
        "--linger-ms": PRESETS["barrier-fair"].linger_ns // MS,
        "--serial-order": PRESETS["barrier-serial"].serial_order,
        "--max-round-ms": rounds_of_engines(),
        "--output-reserve": limits["output_reserve"],
        "--max-queued": limits["queue_length_max"],
        "--max-queue-ms": 0,
        "--client-stall-ms": limits["client_stall_ns"] // MS,
    }
    rows = table(POLICY, "settings")
    assert {row[0].strip("`"): row[1].strip("`") for row in rows} == {
        option: str(default) for option, default in defaults.items()
    }


def rounds_of_engines() -> str:
    gpu, cpu = (ENGINES[name].model.capacity.round_ms for name in (DEFAULT, "cpu-smollm2"))
    return f"{gpu} on GPUs, {cpu} on CPUs"


def test_each_invariant_holds_where_the_page_says():
    rows = table(POLICY, "invariants")
    assert [row[0] for row in rows] == [f"I{i}" for i in range(1, 13)]
    for name, _, under in rows:
        promising = {p.name for p in PRESETS.values() if name in invariants.promises(p)}
        assert promising == presets_of(under), name


def presets_of(text: str) -> set[str]:
    if text.startswith("all"):
        return set(PRESETS) - set(re.findall(r"`(.+?)`", text))
    patterns = re.findall(r"`(.+?)`", text)
    return {name for name in PRESETS for p in patterns if re.fullmatch(p.replace("*", ".*"), name)}


def test_every_rule_has_a_section():
    numbers = [int(n) for n in re.findall(r"^### R(\d+) ", POLICY, re.MULTILINE)]
    assert numbers == list(range(1, 19))
    for section in re.split(r"^### (?=R\d+ )", POLICY, flags=re.MULTILINE)[1:]:
        rule = section.split("\n## ")[0]
        assert all(rule.count(part) == 1 for part in ("- *Why:*", "- *Cost:*", "- *Where:*")), rule


# --- figures --------------------------------------------------------------------------------------


class Watched:
    """What the example's tables are made of, all in nanoseconds; requests are 0, 1 and 2."""

    def __init__(self, policy: Policy, workload: Path) -> None:
        self.first: dict[int, int] = {}  # delivery
        self.seat: dict[int, int] = {}
        self.ready: dict[int, int] = {}
        self.prefill: dict[int, int] = {}  # rounds between seat and ready
        self.longest: dict[str, int] = {}  # round of each kind
        self.gap = 0  # largest, of request 0
        self._last = 0
        model = ENGINES[DEFAULT].model
        limits = replace(limits_of(describe(model)), round_ns_max=model.capacity.round_ms * MS)
        loaded = read_workload(workload)
        scene = Scene(limits=limits, policy=policy, model=model, cut_ns=loaded.cut_ns)
        simulate(scene, arrivals_of(loaded, 0), watch=self.watch)

    def watch(self, event: AnyEvent, before: State, after: State, effects: Effects) -> None:
        now_ns = event.at_ns
        if isinstance(event, RoundCompleted) and before.flight is not None:
            kind, length_ns = before.flight.kind, event.duration_ns
            self.longest[kind] = max(length_ns, self.longest.get(kind, 0))
            for request_id in self.seat.keys() - self.ready.keys():
                if kind in vocabulary.PREFILL_CLASS:
                    self.prefill[request_id] = self.prefill.get(request_id, 0) + length_ns
        for s in after.slots:
            if s is not None and s.role in ("ready", "generating"):
                self.ready.setdefault(s.request.request_id, now_ns)
        for effect in effects:
            if isinstance(effect, SeatRequest):
                self.seat[effect.request_id] = now_ns
            elif isinstance(effect, DeliverTokens):
                for delivery in effect.deliveries:
                    self.first.setdefault(delivery.request_id, now_ns)
                if any(delivery.request_id == 0 for delivery in effect.deliveries):
                    self.gap = max(self.gap, now_ns - self._last if self._last else 0)
                    self._last = now_ns


def seconds(length_ns: int) -> str:
    return f"{length_ns / SECOND:.2f}"


@pytest.fixture(scope="module")
def example(tmp_path_factory) -> Callable[[Policy], Watched]:
    path = tmp_path_factory.mktemp("docs") / "three.toml"
    blocks = re.findall(r"```toml\n(.*?)```", POLICY, re.DOTALL)
    path.write_text(blocks[0])
    return lambda policy: Watched(policy, path)


@pytest.mark.parametrize("row", table(POLICY, "presets compared"), ids=lambda row: row[0])
def test_the_presets_compare_as_the_page_says(row, example):
    run = example(PRESETS[row[0].strip("`")])
    arrived_ns, cut_ns = 5 * SECOND, 300 * SECOND
    late = f"not within {(cut_ns - arrived_ns) // SECOND}"
    firsts = [seconds(run.first[i] - arrived_ns) if i in run.first else late for i in (1, 2)]
    assert row[1:] == [*firsts, seconds(run.gap)]


def test_the_bounds_of_quantum_are_computed_and_kept(example):
    policy = PRESETS["quantum"]
    run = example(policy)
    rp, rd, rs = (run.longest[kind] for kind in ("prefill", "decode", "sample"))
    qp, qd = policy.prefill_quantum_ns, policy.decode_quantum_ns
    rows = table(POLICY, "bounds")
    gap = qp + rp + rs + rd
    assert run.gap <= gap
    assert rows[0][1:] == ["", seconds(gap), seconds(run.gap)]
    for row, request_id in zip(rows[1:], (1, 2), strict=True):
        s = run.prefill[request_id]
        bound = s + (1 + -(-s // qp)) * (qd + rs + rd)
        length = run.ready[request_id] - run.seat[request_id]
        assert length <= bound
        assert row[1:] == [seconds(s), seconds(bound), seconds(length)]
    longest = re.search(
        r"\*r_p\* = ([\d.]+) s, \*r_d\* = ([\d.]+) s,\s\*r_s\* =\s([\d.]+) s", POLICY
    )
    assert longest is not None
    assert longest.groups() == tuple(f"{length / SECOND:.3f}" for length in (rp, rd, rs))


@pytest.mark.parametrize("rule", [f"R{i}" for i in range(1, 19)])
def test_every_rule_has_a_transcript(rule):
    assert list((ROOT / "fixtures" / "transcripts").glob(f"{rule}-*.txt"))
