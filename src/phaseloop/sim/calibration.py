"""The measured figures that the engine presets are held against, and what the presets say to them.

The figures are of another server and of other harnesses, on the hardware that a preset is named
after; section numbers are those of the list they came in.  What a figure is to its preset:

    fitted     a parameter was chosen so that this figure comes out
    predicted  no parameter was chosen with this figure in view
    compared   told apart from the preset by something the model does not have (named there); shown,
               so that nobody trusts the model further than it reaches

The MTP pair shows how few numbers are free: the two rates of figures 3.4 fix what a round costs,
the hook and the cost of a second lane come from quotients of totals.  So one total of the four is
predicted in level (3.3, fair) and one in the difference between policies (3.4, serial), and so is
every number of rounds, and what another drafter of another depth makes of the same rounds.
"""

from collections.abc import Callable, Iterator
from typing import Literal, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from phaseloop.core.policy import PRESETS as POLICIES
from phaseloop.core.vocabulary import AnyEvent, Effects, Request, RoundCompleted
from phaseloop.engine.protocol import limits_of
from phaseloop.engine.sim import SimModel, describe
from phaseloop.engine.sim_presets import SMOLLM, V100, V100_MTP

from .arrivals import Arrival
from .metrics import Summary
from .world import Scene, simulate

Use: TypeAlias = Literal["fitted", "predicted", "compared"]


class Figure(Struct, frozen=True):
    """One measurement and how to simulate it.  `tolerance` is what a test allows."""

    section: str  # of the figures; "phases 4" is a count of rounds
    what: str
    unit: str
    measured: float
    use: Use
    tolerance: float
    simulated: Callable[[], float]


def requests(*wishes: Request) -> Iterator[Arrival]:
    """All at once, and none ends by itself."""
    return iter([Arrival(0, wish, (None,) * wish.choices) for wish in wishes])


def run(model: SimModel, policy: str, arrivals: Iterator[Arrival], seed: int = 0) -> Summary:
    scene = Scene(
        limits=limits_of(describe(model)), policy=POLICIES[policy], model=model, seed=seed
    )
    return simulate(scene, arrivals)


PAIR = (8192, 32_768)
STOPS_BEFORE_END = (1028, 4)  # where that server stops for checkpoints: UB + 4 and 4 before the end


def pair(model: SimModel, policy: str, *, stops: bool = False) -> Summary:
    wishes = (
        Request(
            request_id,
            length,
            output_limit=8,
            stop_points=tuple(length - before for before in STOPS_BEFORE_END) if stops else (),
        )
        for request_id, length in enumerate(PAIR)
    )
    return run(model, policy, requests(*wishes))


def pair_seconds(model: SimModel, policy: str) -> float:
    return pair(model, policy).prefill_makespan_s or 0.0


def short_waits(model: SimModel) -> float:
    """How long the short prompt of the pair waits at the barrier."""
    return pair(model, "barrier-fair").barrier_wait_s.max or 0.0


def short_ready(model: SimModel) -> float:
    return pair_seconds(model, "barrier-fair") - short_waits(model)


def decode_rate(model: SimModel, past: int = 100, sequences: int = 16) -> float:
    """Tokens a second of one sequence after another, 256 tokens each, drafts included."""
    wishes = (Request(number, past, output_limit=256) for number in range(sequences))
    serial = SimModel(model.name, replace(model.capacity, slot_count=1), model.cost)
    return run(serial, "barrier-fair", requests(*wishes)).decode_tokens_per_s or 0.0


def four_at_once(model: SimModel, repeats: int = 8) -> float:
    """Seconds until four requests at once have 256 tokens each, their mean over several draws."""
    total = 0.0
    for seed in range(repeats):
        wishes = (Request(number, 100, output_limit=256) for number in range(4))
        total += run(model, "barrier-fair", requests(*wishes), seed).makespan_s or 0.0
    return total / repeats


def cold_prompt(model: SimModel, length: int) -> float:
    wish = Request(0, length, output_limit=1)
    return run(model, "barrier-fair", requests(wish)).ttft_s.max or 0.0


def prefill_rate_at(model: SimModel, past: int) -> float:
    """Prompt tokens a second of the round that begins at this past."""
    durations: list[tuple[int, int]] = []

    def watch(event: AnyEvent, before: object, after: object, effects: Effects) -> None:
        if isinstance(event, RoundCompleted):
            durations.append((len(event.results), event.duration_ns))

    tokens = 128
    small = replace(model.capacity, batch_tokens=tokens, slot_count=1)
    scene = Scene(
        limits=limits_of(describe(SimModel(model.name, small, model.cost))),
        policy=POLICIES["barrier-fair"],
        model=model,
    )
    simulate(scene, requests(Request(0, past + tokens, output_limit=0)), watch=watch)
    return tokens * 1e9 / durations[past // tokens][1]


def dflash() -> SimModel:
    """The same engine with another drafter: 173 of 563 drafts of depth 7 accepted."""
    capacity = replace(V100_MTP.capacity, draft_tokens=7, accept_ppm=701_200)
    return SimModel("v100x4-qwen27b-dflash2", capacity, V100_MTP.cost)


def both_decoding() -> float:
    """Tokens a second of each of two streams at the contexts of the live observation."""
    capacity = replace(V100_MTP.capacity, draft_tokens=2)
    model = SimModel(V100_MTP.name, capacity, V100_MTP.cost)
    wishes = (Request(n, length, output_limit=314) for n, length in enumerate((34_576, 212_252)))
    return (run(model, "barrier-fair", requests(*wishes)).decode_tokens_per_s or 0.0) / 2


V100_FIGURES = (
    Figure(
        "3.3",
        "pair, all prompt tokens, fair",
        "s",
        42.583,
        "predicted",
        0.02,
        lambda: pair_seconds(V100, "barrier-fair"),
    ),
    Figure(
        "3.3",
        "pair, all prompt tokens, serial",
        "s",
        42.25655,
        "fitted",
        0.02,
        lambda: pair_seconds(V100, "barrier-serial"),
    ),
    Figure(
        "phases 4",
        "pair without stops, rounds, either policy",
        "",
        20,
        "predicted",
        0,
        lambda: pair(V100, "barrier-fair").prefill_rounds,
    ),
    Figure(
        "phases 4",
        "pair with checkpoint stops, rounds, fair",
        "",
        22,
        "predicted",
        0,
        lambda: pair(V100, "barrier-fair", stops=True).prefill_rounds,
    ),
    Figure(
        "phases 4",
        "pair with checkpoint stops, rounds, serial",
        "",
        24,
        "predicted",
        0,
        lambda: pair(V100, "barrier-serial", stops=True).prefill_rounds,
    ),
)
MTP_FIGURES = (
    Figure(
        "3.4",
        "pair, all prompt tokens, fair",
        "s",
        45.718,
        "fitted",
        0.02,
        lambda: pair_seconds(V100_MTP, "barrier-fair"),
    ),
    Figure(
        "3.4",
        "pair, all prompt tokens, serial",
        "s",
        45.463,
        "predicted",
        0.02,
        lambda: pair_seconds(V100_MTP, "barrier-serial"),
    ),
    Figure(
        "3.4",
        "pair, short prompt ready, fair",
        "s",
        16.0,
        "fitted",
        0.1,
        lambda: short_ready(V100_MTP),
    ),
    Figure(
        "3.4",
        "pair, short prompt waits at the barrier",
        "s",
        29.7,
        "fitted",
        0.1,
        lambda: short_waits(V100_MTP),
    ),
    Figure(
        "3.6", "decode alone, MTP(3)", "tok/s", 44.77, "fitted", 0.05, lambda: decode_rate(V100_MTP)
    ),
    Figure(
        "3.6",
        "four at once, 256 tokens each, MTP(3)",
        "s",
        12.048,
        "fitted",
        0.1,
        lambda: four_at_once(V100_MTP),
    ),
    Figure(
        "3.6",
        "decode alone, DFlash2(7)",
        "tok/s",
        36.8,
        "predicted",
        0.1,
        lambda: decode_rate(dflash()),
    ),
    Figure(
        "3.6",
        "cold prompt of 20,000 (other drafter, stops)",
        "s",
        22.48,
        "compared",
        0.1,
        lambda: cold_prompt(V100_MTP, 20_000),
    ),
    Figure(
        "3.6",
        "four at once, DFlash2(7) (32 rows: beyond the fit)",
        "s",
        13.2,
        "compared",
        0.5,
        lambda: four_at_once(dflash()),
    ),
    Figure(
        "3.1",
        "two streams at 35k and 212k, each (images, other traffic: 9 to 15)",
        "tok/s",
        12,
        "compared",
        1.0,
        both_decoding,
    ),
)
SMOLLM_FIGURES = (
    Figure(
        "-",
        "prompt tokens at past 1,024, one thread",
        "tok/s",
        88,
        "fitted",
        0.03,
        lambda: prefill_rate_at(SMOLLM, 1024),
    ),
    Figure(
        "-",
        "one token at depth 1,500",
        "ms",
        19,
        "fitted",
        0.05,
        lambda: 1000 / decode_rate(SMOLLM, past=1372, sequences=1),
    ),
)
FIGURES: dict[str, tuple[Figure, ...]] = {
    V100.name: V100_FIGURES,
    V100_MTP.name: MTP_FIGURES,
    SMOLLM.name: SMOLLM_FIGURES,
}
