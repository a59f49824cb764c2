"""Which cost model a run is made again with."""

from argparse import Namespace

from msgspec import Struct
from msgspec.structs import replace

from phaseloop.engine.sim import SimModel
from phaseloop.engine.sim_cost import Cost
from phaseloop.engine.sim_fields import SettingError
from phaseloop.engine.sim_file import find_engine
from phaseloop.engine.sim_presets import PRESETS
from phaseloop.runtime.trace import Header
from phaseloop.sim.fit import FitError, fit_trace
from phaseloop.sim.replay_scenario import Scenario

from .errors import UserError

FIT = "fit"


class Pricing(Struct, frozen=True):
    name: str  # where the costs are from, in words
    model: SimModel
    notes: tuple[str, ...] = ()

    @property
    def cost(self) -> Cost:
        return self.model.cost

    def applied(self, scenario: Scenario) -> Scenario:
        """The scenario on an engine that can be aborted as often as this one."""
        return replace(scenario, step_tokens=self.model.capacity.step_tokens)


def pricing_of(args: Namespace, header: Header) -> Pricing:
    """`--cost` if given; else the preset that the trace was made with, or one fitted to it."""
    name = args.cost if args.cost is not None else header.engine
    if name in PRESETS:
        return Pricing(name, PRESETS[name].model)
    if args.cost is None or args.cost == FIT:
        return fitted(args)
    try:
        return Pricing(name, find_engine(name))
    except SettingError as error:
        raise UserError(str(error).replace("--engine", "--cost")) from None


def fitted(args: Namespace) -> Pricing:
    try:
        fit = fit_trace(args.trace, FIT)
    except FitError as error:
        known = ", ".join(PRESETS)
        what = "name a cost model with --cost: an engine's file, or one of"
        raise UserError(f"{args.trace}: {error}; {what} {known}") from None
    errors = ", ".join(
        f"{residual.kind} {residual.rms:.1%} (worst {residual.worst:.1%})"
        for residual in fit.residuals
    )
    notes = [f"costs fitted to this trace; relative error by kind of round: {errors}"]
    if fit.unseen:
        notes.append(f"no round of the trace tells {', '.join(fit.unseen)}: taken as 0")
    return Pricing("costs fitted to the trace", fit.model, tuple(notes))
