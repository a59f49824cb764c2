"""The engines that ship with the simulator, and where each of their parameters comes from.

"Figures N.N" are sections of the measurements, made with another server and on other machines, that
phaseloop's design started from.  sim/calibration.py has those that a simulation can be held
against, and `phaseloop simulate --list-engines` prints both; what is called *predicted* there went
into no parameter.

The GPU engine is four V100 (16 GB) with Qwen3.8-27B Q5_K_XL, layers split, batch 2,048.  Its prompt
costs come from the two rates of figures 3.4, taken while two prompts share a round (512 tok/s for
each) and while one is alone (825 tok/s), with the drafter's share removed; how the total of the
pair comes out under either policy is predicted.
"""

from msgspec import Struct
from msgspec.structs import replace

from .sim import Capacity, SimModel
from .sim_cost import Cost

MS = 1_000_000


class Preset(Struct, frozen=True):
    """`sources` says for each parameter that is not zero which figure it was fitted to."""

    model: SimModel
    about: str
    sources: dict[str, str]


V100 = SimModel(
    "v100x4-qwen27b",
    Capacity(
        slot_count=4,
        batch_tokens=2048,
        step_tokens=1024,
        context_length=262_144,
        page_count=1563,
        round_ms=1000,
    ),
    Cost(
        prefill_round_ns=37_668_000,
        prefill_token_ns=812_000,
        prefill_pair_ps=14_610,
        prefill_lane_ns=40_800_000,
        decode_round_ns=37_668_000,
        decode_row_ns=5_572_000,
        decode_context_ps=166_900,
        sample_lane_ns=1_500_000,
        copy_token_ps=2_000_000,
        move_token_ps=47_000_000,
    ),
)
V100_SOURCES = {
    "prefill_round_ns": "no figure: taken as decode_round_ns, since either reads the weights once",
    "prefill_token_ns": "figures 3.4: 825 tok/s alone, less the 7.4 % of the hook",
    "prefill_pair_ps": "figures 3.4: 512 tok/s each while sharing against 825 alone",
    "prefill_lane_ns": "figures 3.3: fair minus serial, 0.326 s over 8 shared rounds",
    "decode_round_ns": "figures 3.6: 44.77 tok/s alone, 12.05 s for four, 95 rounds of MTP(3)",
    "decode_row_ns": "figures 3.6: the same two, 4 and 16 rows a round",
    "decode_context_ps": "figures 3.8: 51.8, 44.2 and 29.0 tok/s at 1K, 82K and 250K (one V100)",
    "sample_lane_ns": "no figure: the sampling budget of 0.3 ms at 49k words, scaled to 248k words",
    "copy_token_ps": "figures 3.6: move_token_ps by 5.5 to 128 GB/s of the transfer probe",
    "move_token_ps": "figures 3.6: 20,015 restored tokens and 65 computed in 1.05 s",
}
V100_MTP = SimModel(
    "v100x4-qwen27b-mtp",
    replace(V100.capacity, draft_tokens=3, accept_ppm=735_300),
    replace(V100.cost, prefill_hook_ppm=73_600),
)
MTP_SOURCES = {
    **V100_SOURCES,
    "prefill_hook_ppm": "figures 3.4 over 3.3: 45.718 s / 42.583 s, fair",
    "accept_ppm": "figures 3.6: 159 of 285 drafts at depth 3, q + q^2 + q^3 = 3 * 159/285",
}
SMOLLM = SimModel(
    "cpu-smollm2",
    Capacity(
        slot_count=4,
        batch_tokens=512,
        step_tokens=128,
        context_length=8192,
        page_count=128,
        round_ms=500,
        forks_anywhere=True,
    ),
    Cost(
        prefill_round_ns=5_780_000,
        prefill_token_ns=6_300_000,
        prefill_pair_ps=4_610_000,
        decode_round_ns=5_780_000,
        decode_row_ns=6_300_000,
        decode_context_ps=4_610_000,
        sample_lane_ns=300_000,
        copy_token_ps=2_300_000,
        move_token_ps=2_300_000,
    ),
)
SMOLLM_SOURCES = {
    "prefill_round_ns": "no figure: taken as decode_round_ns",
    "prefill_token_ns": "measured: 119 tok/s at past 1,024 (one thread, plain attention), less the "
    "quarter of its arithmetic that is attention",
    "prefill_pair_ps": "measured: 88 tok/s at past 1,024 (one thread, bit-stable attention)",
    "decode_round_ns": "measured: 19 ms a token at depth 1,500, less its row and its context",
    "decode_row_ns": "no figure: taken as prefill_token_ns",
    "decode_context_ps": "no figure: taken as prefill_pair_ps, one row's attention",
    "sample_lane_ns": "no figure: the sampling budget of 0.3 ms at 49k words",
    "copy_token_ps": "no figure: 23 kB of cache a token at 10 GB/s",
    "move_token_ps": "no figure: as copy_token_ps",
}
PRESETS: dict[str, Preset] = {
    preset.model.name: preset
    for preset in (
        Preset(V100, "4 x V100, Qwen3.8-27B Q5_K_XL, no drafter", V100_SOURCES),
        Preset(V100_MTP, "the same with MTP(3) drafting, and its hook on prompts", MTP_SOURCES),
        Preset(SMOLLM, "SmolLM2-135M Q4_1 on one CPU thread, bit-stable", SMOLLM_SOURCES),
    )
}
DEFAULT = V100.name
