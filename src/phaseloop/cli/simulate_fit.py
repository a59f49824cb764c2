"""`phaseloop simulate --fit`: an engine from a trace's rounds."""

import sys
from argparse import Namespace

from msgspec.structs import asdict

from phaseloop.engine.sim_file import engine_toml
from phaseloop.runtime.output import create
from phaseloop.sim.fit import Fit, fit_trace

from .simulate_options import refuse_overwriting

MS = 1_000_000


def fit(args: Namespace) -> int:
    if args.fit_out is not None:
        refuse_overwriting("--fit-out", args.fit_out, {"the trace": args.fit})
    name = args.fit.stem if args.fit_out is None else args.fit_out.stem
    found = fit_trace(args.fit, f"fitted-{name}")
    sys.stdout.write("\n".join(fit_lines(found)) + "\n")
    if args.fit_out is not None:
        comments = (f"Fitted to {args.fit.name} by phaseloop simulate --fit.", *warnings(found))
        with create(args.fit_out) as out:
            out.write(engine_toml(found.model, comments).encode())
    return 0


def fit_lines(found: Fit) -> list[str]:
    costs = asdict(found.model.cost)
    lines = ["parameters"]
    for name, value in costs.items():
        if value or name not in found.unseen:
            lines.append(f"  {name:<18} {value:>14,}")
    if found.model.capacity.accept_ppm:
        lines.append(f"  {'accept_ppm':<18} {found.model.capacity.accept_ppm:>14,}")
    lines += ["", f"residuals {'rounds':>9} {'mean':>12} {'rms':>8} {'worst':>8}"]
    lines += [
        f"  {one.kind:<7} {one.rounds:>9,} {one.mean_ns / MS:>9.2f} ms "
        f"{one.rms:>8.2%} {one.worst:>8.2%}"
        for one in found.residuals
    ]
    return [*lines, *("" for _ in warnings(found)[:1]), *warnings(found)]


def warnings(found: Fit) -> list[str]:
    lines: list[str] = []
    if found.indistinct:
        names = ", ".join(found.indistinct)
        lines.append(f"These rounds cannot tell these apart, their split is arbitrary: {names}.")
    if found.unseen:
        lines.append(f"No round says anything about, so they are 0: {', '.join(found.unseen)}.")
    return lines
