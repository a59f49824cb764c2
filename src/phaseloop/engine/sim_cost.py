"""How long a round takes: a handful of integers, linear in what the round carries.

    prefill, encode   round + rows * token + pairs * pair + (lanes - 1) * lane, times the hook
    decode            round + rows * row + context * context
    mixed             the prompt lanes as in prefill; the tokens that ride along are rows like any
                      other of that round, read their own context, and are lanes of it
    sample            lanes * sample
    fork              copied tokens * copy;  save, restore: moved tokens * move
    shift             one decode round without rows

`pairs` counts (token, earlier token of its sequence): a chunk of n tokens after a past of p makes
n * (p + n/2) of them, which is the quadratic term of attention.  `context` is the sum over lanes of
the tokens each one reads.

Durations are integers of nanoseconds.  Where a nanosecond is too coarse a unit the parameter is in
picoseconds (`_ps`); shares are in millionths (`_ppm`).
"""

from collections.abc import Callable

from msgspec import Struct

from phaseloop.core.vocabulary import Lane, LaunchRound

from .sim_draws import draw

PS = 1_000
PPM = 1_000_000
JITTER_KEY = 1


class Cost(Struct, frozen=True, gc=False, kw_only=True):
    """The parameters.  All are at least 0."""

    prefill_round_ns: int = 0
    prefill_token_ns: int = 0
    prefill_pair_ps: int = 0
    prefill_lane_ns: int = 0
    prefill_hook_ppm: int = 0  # what a drafter adds to every prompt round
    decode_round_ns: int = 0
    decode_row_ns: int = 0
    decode_context_ps: int = 0
    sample_lane_ns: int = 0
    copy_token_ps: int = 0
    move_token_ps: int = 0
    jitter_ppm: int = 0  # durations vary by up to this much, either way


def duration_ns(cost: Cost, launch: LaunchRound, has_begun: Callable[[Lane], bool]) -> int:
    """`has_begun`: whether a lane's sequence has its first token; asked in mixed rounds only."""
    lanes = launch.lanes
    match launch.kind:
        case "prefill" | "encode":
            return prefill_ns(cost, lanes, ())
        case "decode":
            return decode_ns(cost, lanes)
        case "mixed":
            tokens = tuple(lane for lane in lanes if has_begun(lane))
            prompts = tuple(lane for lane in lanes if not has_begun(lane))
            return prefill_ns(cost, prompts, tokens) if prompts else decode_ns(cost, tokens)
        case "sample":
            return len(lanes) * cost.sample_lane_ns
        case "fork":
            return sum(lane.count for lane in lanes) * cost.copy_token_ps // PS
        case "save" | "restore":
            return sum(lane.count for lane in lanes) * cost.move_token_ps // PS
        case "shift":
            return cost.decode_round_ns


def prefill_ns(cost: Cost, prompts: tuple[Lane, ...], tokens: tuple[Lane, ...]) -> int:
    rows = pairs = 0
    for lane in prompts:
        rows += lane.count
        pairs += pairs_of(lane)
    context = sum(lane.start + lane.count for lane in tokens)
    rows += sum(lane.count for lane in tokens)
    compute_ns = cost.prefill_round_ns + rows * cost.prefill_token_ns
    compute_ns += (len(prompts) + len(tokens) - 1) * cost.prefill_lane_ns
    compute_ns += (pairs * cost.prefill_pair_ps + context * cost.decode_context_ps) // PS
    return compute_ns * (PPM + cost.prefill_hook_ppm) // PPM


def pairs_of(lane: Lane) -> int:
    return lane.count * (2 * lane.start + lane.count) // 2


def decode_ns(cost: Cost, lanes: tuple[Lane, ...]) -> int:
    rows = context = 0
    for lane in lanes:
        rows += lane.count
        context += lane.start + lane.count
    row_ns = rows * cost.decode_row_ns
    return cost.decode_round_ns + row_ns + context * cost.decode_context_ps // PS


def jittered_ns(cost: Cost, length_ns: int, seed: int, round_id: int) -> int:
    """The length, moved by a uniform share of up to `jitter_ppm`, drawn for this round alone."""
    if not cost.jitter_ppm:
        return length_ns
    share_ppm = draw(JITTER_KEY, seed, round_id) % (2 * cost.jitter_ppm + 1) - cost.jitter_ppm
    return length_ns * (PPM + share_ppm) // PPM
