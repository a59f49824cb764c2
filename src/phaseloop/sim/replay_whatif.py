"""Counterfactuals: the recorded calls under another policy or under other limits."""

from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import replace

from phaseloop.core.policy import PRESETS
from phaseloop.core.state import initial
from phaseloop.core.vocabulary import Policy, PolicyChanged
from phaseloop.engine.sim_cost import Cost

from .metrics import Collector, Summary
from .replay_engine import RecordedEngine
from .replay_rerun import EVENTS_MAX, Rerun, Watcher
from .replay_scenario import Scenario
from .replay_text import MS

Change = Callable[[Scenario], Scenario]


class ChangeError(ValueError):
    """A change that does not exist, or has no such value."""


class Range(Struct, frozen=True):
    """A whole number that a change takes, and how it is stored."""

    low: int
    high: int
    scale: int = 1


# Named as the options of `phaseloop serve` and `phaseloop simulate` are.
POLICY_NUMBERS: dict[str, tuple[str, Range]] = {
    "tg-quantum-ms": ("decode_quantum_ns", Range(0, 10**9, MS)),
    "pp-quantum-ms": ("prefill_quantum_ns", Range(0, 10**9, MS)),
    "seat-quantum-ms": ("seat_quantum_ns", Range(0, 10**9, MS)),
    "linger-ms": ("linger_ns", Range(0, 10**9, MS)),
}
LIMIT_NUMBERS: dict[str, tuple[str, Range]] = {
    "slots": ("slot_count", Range(1, 1 << 12)),
    "batch": ("batch_tokens", Range(1, 1 << 24)),
    "context": ("context_length", Range(1, 1 << 32)),
    "pages": ("page_count", Range(1, 1 << 32)),
    "max-round-ms": ("round_ns_max", Range(0, 10**9, MS)),
    "max-queued": ("queue_length_max", Range(0, 1 << 32)),
    "output-reserve": ("output_reserve", Range(0, 1 << 32)),
    "client-stall-ms": ("client_stall_ns", Range(0, 10**9, MS)),
}
NAMES = ("policy", "serial-order", *POLICY_NUMBERS, *LIMIT_NUMBERS)


def parse_changes(text: str) -> Change:
    """`policy=quantum,tg-quantum-ms=500`.  Raises ChangeError, which names what may stand there."""
    pairs: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if name not in NAMES:
            raise ChangeError(f"--what-if: {name!r} is not one of {', '.join(NAMES)}")
        if not equals or name in pairs:
            raise ChangeError(f"--what-if: {name} needs one value, as in {name}=...")
        pairs[name] = value
    policy = change_policy(pairs)
    limits = {
        field: number("--what-if", name, pairs[name], allowed)
        for name, (field, allowed) in LIMIT_NUMBERS.items()
        if name in pairs
    }

    def change(scenario: Scenario) -> Scenario:
        scenario = replace(scenario, limits=replace(scenario.limits, **limits))
        return policy(scenario)

    return change


def check_effect(text: str, before: Scenario, after: Scenario) -> None:
    """Raises ChangeError for a change that changes nothing, and says why."""
    pairs = dict(part.strip().split("=", 1) for part in text.split(","))
    wanted = {
        "tg-quantum-ms": after.policy.switch == "quantum",
        "pp-quantum-ms": after.policy.switch == "quantum",
        "seat-quantum-ms": after.policy.switch == "quantum" and after.limits.can_save,
        "linger-ms": after.policy.switch == "barrier",
        "serial-order": after.policy.share == "serial",
    }
    for name in pairs:
        if not wanted.get(name, True):
            why = f"means nothing under {after.policy.name}"
            if name == "seat-quantum-ms" and after.policy.switch == "quantum":
                why = "means nothing on an engine that cannot move sequences to host RAM"
            raise ChangeError(f"--what-if: {name} {why}")
        alone = parse_changes(f"{name}={pairs[name]}")(before)
        if alone == before and "policy" not in pairs:
            raise ChangeError(f"--what-if: {name}={pairs[name]} is as it was recorded")
    if after == before:
        raise ChangeError(f"--what-if: {text} is as it was recorded")


def change_policy(pairs: dict[str, str]) -> Change:
    """A policy asked for holds from the beginning on, so recorded changes of policy are dropped."""
    fields: dict[str, int | str] = {
        field: number("--what-if", name, pairs[name], allowed)
        for name, (field, allowed) in POLICY_NUMBERS.items()
        if name in pairs
    }
    if (order := pairs.get("serial-order")) is not None:
        if order not in ("fifo", "shortest"):
            raise ChangeError(f"--what-if: serial-order={order} is not fifo or shortest")
        fields["serial_order"] = order
    name = pairs.get("policy")
    if name is not None and name not in PRESETS:
        raise ChangeError(f"--what-if: policy={name} is not one of {', '.join(PRESETS)}")

    def change(scenario: Scenario) -> Scenario:
        base: Policy = scenario.policy if name is None else PRESETS[name]
        if name is not None:
            scenario = without_policy_changes(scenario)
        return replace(scenario, policy=replace(base, **fields))

    return change


def without_policy_changes(scenario: Scenario) -> Scenario:
    kept = [i for i, event in enumerate(scenario.inputs) if not isinstance(event, PolicyChanged)]
    inputs = tuple(scenario.inputs[i] for i in kept)
    after = tuple(scenario.after[i] for i in kept) if scenario.after else ()
    return replace(scenario, inputs=inputs, after=after)


def number(option: str, name: str, text: str, allowed: Range) -> int:
    plain = text.isascii() and text.isdigit() and len(text) <= 18
    if not plain or not allowed.low <= int(text) <= allowed.high:
        what = f"is not a whole number in {allowed.low}..{allowed.high}"
        raise ChangeError(f"{option}: {name}={text} {what}")
    return int(text) * allowed.scale


def summary_of(
    scenario: Scenario,
    cost: Cost,
    watchers: tuple[Watcher, ...] = (),
    events_max: int = EVENTS_MAX,
) -> Summary:
    """Make the run and measure it.  Raises RerunError where it has no end."""
    collector = Collector(scenario.limits, scenario.policy)
    rerun = Rerun(
        RecordedEngine(scenario, cost),
        initial(scenario.limits, scenario.policy),
        (collector.observe, *watchers),
        until_ns=scenario.until_ns,
        events_max=events_max,
    )
    rerun.enter(scenario.inputs, scenario.after)
    rerun.run()
    return collector.summary()
