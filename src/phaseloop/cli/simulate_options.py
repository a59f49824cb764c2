"""The options of `phaseloop simulate`: their ranges, and what they make of engine and policy."""

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path

from msgspec.structs import replace

from phaseloop.core.policy import DEFAULT, MS, PRESETS
from phaseloop.core.state import Limits
from phaseloop.core.vocabulary import Policy
from phaseloop.engine.protocol import limits_of
from phaseloop.engine.sim import SimModel, describe
from phaseloop.engine.sim_cost import PPM
from phaseloop.engine.sim_faults import Faults, parse_failure, parse_slowness
from phaseloop.engine.sim_fields import nearest
from phaseloop.engine.sim_presets import DEFAULT as DEFAULT_ENGINE
from phaseloop.engine.sim_presets import PRESETS as ENGINES

from .errors import UserError, some_path

MS_MAX = 10**9


class Bounded:
    """An integer, or with `digits` a number, from `low` to `high`."""

    def __init__(self, low: int, high: int, *, fractional: bool = False) -> None:
        self._low, self._high = low, high
        self._fractional = fractional

    def __call__(self, text: str) -> float:
        kind = "a number" if self._fractional else "an integer"
        try:
            value = float(text) if self._fractional else int(text)
        except ValueError:
            raise ArgumentTypeError(f"{text!r} is not {kind}") from None
        if not self._low <= value <= self._high:
            raise ArgumentTypeError(f"{text} is not from {self._low} to {self._high}")
        return value


MILLISECONDS = Bounded(0, MS_MAX)


def add_options(parser: ArgumentParser) -> None:
    what = parser.add_argument_group("what is run")
    what.add_argument(
        "--engine",
        metavar="NAME|FILE",
        default=DEFAULT_ENGINE,
        help=f"{', '.join(ENGINES)}, or a TOML file; {DEFAULT_ENGINE} by default",
    )
    policy = what.add_mutually_exclusive_group()
    policy.add_argument(
        "--policy", metavar="NAME", help=f"one of {', '.join(PRESETS)}; {DEFAULT} by default"
    )
    policy.add_argument("--compare", metavar="A,B|all", help="several of them, side by side")
    what.add_argument(
        "--seed", type=Bounded(0, (1 << 63) - 1), metavar="N", help="instead of the workload's"
    )
    add_limits(parser)
    add_policy_options(parser)
    trouble = parser.add_argument_group("trouble")
    trouble.add_argument(
        "--fail",
        nargs="+",
        action="extend",
        default=[],
        metavar="WHAT@WHEN",
        help="lane, round or engine, such as round@120 or lane@1%%",
    )
    trouble.add_argument(
        "--slow",
        nargs="+",
        action="extend",
        default=[],
        metavar="FACTORx@WHEN",
        help="such as 3x@10s-20s",
    )
    trouble.add_argument(
        "--jitter",
        type=Bounded(0, 100, fractional=True),
        metavar="PERCENT",
        help="durations vary by up to so much, either way",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="an array, one object per policy")
    output.add_argument("--trace", type=some_path, metavar="FILE", help="for phaseloop replay")
    engines = parser.add_argument_group("engines")
    engines.add_argument(
        "--list-engines", action="store_true", help="their parameters, and the figures behind them"
    )
    engines.add_argument(
        "--fit", type=some_path, metavar="TRACE", help="fit an engine to its rounds"
    )
    engines.add_argument("--fit-out", type=some_path, metavar="FILE", help="write it, for --engine")


def add_limits(parser: ArgumentParser) -> None:
    limits = parser.add_argument_group("limits (by default the engine's)")
    limits.add_argument("--slots", type=Bounded(1, 4096), metavar="N", help="sequences at once")
    limits.add_argument(
        "--batch", type=Bounded(1, 1 << 20), metavar="TOKENS", help="rows of a round"
    )
    limits.add_argument(
        "--context", type=Bounded(2, 1 << 28), metavar="TOKENS", help="of a sequence"
    )
    limits.add_argument("--pages", type=Bounded(1, 1 << 28), metavar="N", help="of KV capacity")
    limits.add_argument(
        "--max-round-ms",
        type=MILLISECONDS,
        metavar="MS",
        help="longest prompt round; 0: bounded by tokens alone (GPU engines 1000, CPU 500)",
    )
    limits.add_argument(
        "--draft", type=Bounded(0, 32), metavar="K", help="drafts per lane and round"
    )
    limits.add_argument(
        "--max-queued", type=Bounded(0, 10**9), metavar="N", help="requests that may wait (1024)"
    )
    limits.add_argument(
        "--max-queue-ms", type=MILLISECONDS, metavar="MS", help="longest wait for a seat; 0: any"
    )
    limits.add_argument(
        "--output-reserve",
        type=Bounded(1, 1 << 28),
        metavar="TOKENS",
        help="held for who states no limit (512)",
    )
    limits.add_argument(
        "--client-stall-ms", type=MILLISECONDS, metavar="MS", help="longest stall (30000)"
    )


def add_policy_options(parser: ArgumentParser) -> None:
    policy = parser.add_argument_group("policy")
    policy.add_argument(
        "--tg-quantum-ms",
        type=MILLISECONDS,
        metavar="MS",
        help="quantum: a decode phase that others wait for (2000)",
    )
    policy.add_argument(
        "--pp-quantum-ms",
        type=MILLISECONDS,
        metavar="MS",
        help="quantum: a prefill phase that others wait for (1000)",
    )
    policy.add_argument(
        "--seat-quantum-ms",
        type=MILLISECONDS,
        metavar="MS",
        help="quantum: lend on a seat held so long (0: never)",
    )
    policy.add_argument(
        "--linger-ms",
        type=MILLISECONDS,
        metavar="MS",
        help="barrier-*: how long a cohort waits for company (0)",
    )
    policy.add_argument(
        "--serial-order",
        choices=("fifo", "shortest"),
        help="barrier-serial: whose prompt is next (fifo)",
    )


# --- what does not go together --------------------------------------------------------------------

NOT_A_RUN = ("list_engines", "fit")
EITHER_WAY = ("engine",)  # has a default, so that it cannot be told whether it was given


def check_options(args: Namespace) -> None:
    """No option is silently without effect.  Raises UserError."""
    given = [name for name, value in vars(args).items() if value not in (None, False, [])]
    given = [name for name in given if name not in EITHER_WAY]
    if args.fit_out is not None and args.fit is None:
        raise UserError("--fit-out goes with --fit")
    for name in NOT_A_RUN:
        if name in given:
            others = [n for n in given if n not in (name, "fit_out")]
            if others:
                raise UserError(f"{option(name)} goes without {', '.join(map(option, others))}")
            return
    if args.workload is None:
        swallowed = [spec for spec in (*args.fail, *args.slow) if "@" not in spec]
        hint = f"; {swallowed[0]} was read as a fault: put it first" if swallowed else ""
        example = "name a TOML file, such as fixtures/workloads/pair.toml"
        raise UserError(f"no workload: {example}{hint}")


def refuse_overwriting(flag: str, path: Path, inputs: dict[str, Path]) -> None:
    """Whatever name or link leads there: nobody's input is written over."""
    for name, source in inputs.items():
        if path.exists() and source.exists() and path.samefile(source):
            raise UserError(f"{flag} {path} would overwrite {name}; name another file")


def option(name: str) -> str:
    return "the workload" if name == "workload" else f"--{name.replace('_', '-')}"


# --- what they make -------------------------------------------------------------------------------


def model_from(args: Namespace, model: SimModel) -> SimModel:
    if args.jitter is not None:
        jitter_ppm = round(args.jitter * PPM / 100)
        model = replace(model, cost=replace(model.cost, jitter_ppm=jitter_ppm))
    if args.draft and not model.capacity.accept_ppm:
        drafters = [name for name, e in ENGINES.items() if e.model.capacity.accept_ppm]
        raise UserError(
            f"--draft {args.draft}: engine {model.name} has no drafter; try --engine "
            f"{' or '.join(drafters)}, or an engine file with accept_ppm above 0"
        )
    return model


def limits_from(args: Namespace, model: SimModel) -> Limits:
    limits = limits_of(describe(model))
    stated = {
        "slot_count": args.slots,
        "batch_tokens": args.batch,
        "context_length": args.context,
        "page_count": args.pages,
        "draft_tokens": args.draft,
        "queue_length_max": args.max_queued,
        "output_reserve": args.output_reserve,
    }
    round_ms = model.capacity.round_ms if args.max_round_ms is None else args.max_round_ms
    changes = {name: value for name, value in stated.items() if value is not None}
    if args.client_stall_ms is not None:
        changes["client_stall_ns"] = args.client_stall_ms * MS
    return replace(limits, round_ns_max=round_ms * MS, **changes)


def policies_from(args: Namespace) -> list[Policy]:
    if args.compare is None:
        names = [DEFAULT if args.policy is None else args.policy]
    elif args.compare == "all":
        names = list(PRESETS)
    else:
        names = [name.strip() for name in args.compare.split(",")]
    for name in names:
        if name not in PRESETS:
            hint = nearest(name, PRESETS)
            raise UserError(f"no policy {name!r}{hint} (there are {', '.join(PRESETS)})")
        if names.count(name) > 1:
            raise UserError(f"--compare: {name} twice")
    policies = [adjusted(PRESETS[name], args) for name in names]
    for flag, policy_names in POLICY_OPTIONS.items():
        if getattr(args, flag) is not None and not any(name in policy_names for name in names):
            wanted = ", ".join(policy_names)
            raise UserError(f"{option(flag)} is for {wanted}, not for {', '.join(names)}")
    return policies


BARRIERS = tuple(name for name, policy in PRESETS.items() if policy.switch == "barrier")
POLICY_OPTIONS = {
    "tg_quantum_ms": ("quantum",),
    "pp_quantum_ms": ("quantum",),
    "seat_quantum_ms": ("quantum",),
    "linger_ms": BARRIERS,
    "serial_order": ("barrier-serial",),
}


def adjusted(policy: Policy, args: Namespace) -> Policy:
    """With those of the options that are for it."""
    if policy.name == "quantum":
        quanta = {
            "decode_quantum_ns": args.tg_quantum_ms,
            "prefill_quantum_ns": args.pp_quantum_ms,
            "seat_quantum_ns": args.seat_quantum_ms,
        }
        return replace(policy, **{n: ms * MS for n, ms in quanta.items() if ms is not None})
    if policy.name == "barrier-serial" and args.serial_order is not None:
        policy = replace(policy, serial_order=args.serial_order)
    if policy.switch == "barrier" and args.linger_ms is not None:
        policy = replace(policy, linger_ns=args.linger_ms * MS)
    return policy


def faults_from(args: Namespace) -> Faults | None:
    """Fresh for each run, as faults that strike once remember it.  Raises SettingError."""
    if not args.fail and not args.slow:
        return None
    return Faults(tuple(map(parse_failure, args.fail)), tuple(map(parse_slowness, args.slow)))
