"""Which phase the engine is in: the presets, and the one function that switches phases.

A policy is a value.  `share` says how prompts share a round (core/plan.py), `switch` says when the
engine turns from prompts to tokens and back, and that is decided here and nowhere else:

    barrier        prompts until every member is ready, then tokens until every member is done
    quantum        prompts and tokens take turns, each for a bounded time
    prompts_first  tokens whenever anybody can generate, prompts otherwise (mainline's -nocb)
    mixed          no phases; the label only says what the last round carried

Phases change only while no round is in flight (R4).  "Active" is a sequence that could emit now:
ready or generating, its client reading, nobody waiting to fork from it.
"""

from msgspec import Struct
from msgspec.structs import replace

from .state import UNFINISHED, Phase, Sequence, State
from .vocabulary import Policy, SlotIndex

MS = 1_000_000
DEFAULT = "barrier-fair"
PRESETS: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        Policy("mixed", share="greedy", switch="mixed"),
        Policy("no-cont-batching", share="greedy", switch="prompts_first"),
        Policy("barrier-greedy", share="greedy", switch="barrier"),
        Policy("barrier-fair", share="fair", switch="barrier"),
        Policy("barrier-serial", share="serial", switch="barrier"),
        Policy(
            "quantum",
            share="fair",
            switch="quantum",
            decode_quantum_ns=2000 * MS,
            prefill_quantum_ns=1000 * MS,
        ),
    )
}


class Outlook(Struct, frozen=True, gc=False):
    """What the seats want, in one pass."""

    prompts: bool  # somebody's prompt is unfinished
    swaps: bool  # somebody leaves for host RAM, to make room
    saves: bool  # a finished sequence's cache is to be copied
    follows: bool  # somebody waits to fork from somebody
    forks: bool  # and could do so now
    waiting: bool  # somebody's prompt is done and its client reads
    active: bool  # and it may emit: nobody waits to fork from it


def outlook(state: State) -> Outlook:
    prompts = swaps = saves = waiting = follows = False
    for s in state.slots:
        if s is None:
            continue
        role = s.role
        if role == "generating" or role == "ready":
            waiting = waiting or s.stalled_until_ns is None
        elif role in UNFINISHED:
            prompts = True
            follows = follows or s.follow is not None
        elif role == "swapping":
            swaps = True
        elif role == "saving":
            saves = True
    forks, active = False, waiting
    if follows:
        forks = any(s is not None and can_fork(state, s) for s in state.slots)
        active = bool(emitters(state))
    return Outlook(prompts, swaps, saves, follows, forks, waiting, active)


def emitters(state: State) -> tuple[Sequence, ...]:
    """Who could emit: ready or generating, read by its client, no fork of it due."""
    led = leaders(state)
    return tuple(
        s
        for slot, s in enumerate(state.slots)
        if s is not None
        and s.role in ("generating", "ready")
        and s.stalled_until_ns is None
        and slot not in led
    )


def leaders(state: State) -> tuple[SlotIndex, ...]:
    """Slots that somebody still waits to fork from: they may not emit before (R6)."""
    return tuple(s.follow.slot for s in state.slots if s is not None and s.follow is not None)


def can_fork(state: State, follower: Sequence) -> bool:
    follow = follower.follow
    if follower.role != "following" or follow is None:
        return False
    leader = state.slots[follow.slot]
    if leader is None or leader.role not in ("prefilling", "ready", "generating"):
        return False
    reached = leader.length == follow.position
    return reached or (state.limits.forks_anywhere and leader.length > follow.position)


def next_phase(state: State, seen: Outlook, now_ns: int, can_seat: bool, can_resume: bool) -> Phase:
    """`can_seat`: the head of the queue would fit now; `can_resume`: a saved sequence would."""
    prompts = seen.prompts or seen.swaps or can_resume
    match state.policy.switch:
        case "barrier":
            return barrier_phase(state, seen, prompts, can_resume)
        case "quantum":
            return quantum_phase(state, seen, now_ns, prompts or can_seat)
        case "prompts_first":
            if seen.swaps or seen.forks or can_resume:
                return "prefill"
            return "decode" if seen.active else "prefill" if prompts or seen.saves else "idle"
        case "mixed":
            if seen.active:
                return "decode"
            return "prefill" if prompts or seen.saves else "idle"


def barrier_phase(state: State, seen: Outlook, prompts: bool, can_resume: bool) -> Phase:
    if state.phase == "decode":
        if seen.swaps or can_resume:
            return "prefill"  # same cohort, still sealed: only memory moves
        return "decode" if seen.active else "idle"
    if prompts or seen.saves:
        return "prefill"
    if seen.active:
        return "decode" if state.phase == "prefill" else "prefill"  # a cohort starts in prefill
    return "idle"


def quantum_phase(state: State, seen: Outlook, now_ns: int, prompts: bool) -> Phase:
    elapsed_ns = now_ns - state.phase_since_ns
    prompts = prompts or seen.saves
    if seen.swaps and state.phase == "decode":
        return "prefill"  # everybody is held until pages are free, or the quantum is over
    if not (prompts and seen.active):
        return "decode" if seen.active else "prefill" if prompts else "idle"
    if state.phase == "prefill":
        over = state.phase_rounds > 0 and elapsed_ns >= state.policy.prefill_quantum_ns
        return "decode" if over else "prefill"
    if state.phase == "decode":
        over = all_groups_served(state) and elapsed_ns >= state.policy.decode_quantum_ns
        return "prefill" if over else "decode"
    return "prefill"


def all_groups_served(state: State) -> bool:
    """Whether each group that could emit has had a decode round in this phase (R11)."""
    return all(s.group in state.phase_groups for s in emitters(state))


def enter(state: State, phase: Phase, now_ns: int) -> State:
    """Begin `phase`; a barrier cohort begins when the engine leaves idleness."""
    if phase == state.phase:
        return state
    cohort, sealed, linger = state.cohort, state.sealed, state.linger_until_ns
    prefill_turns, decode_turns = state.prefill_turns, state.decode_turns
    if phase == "idle":
        sealed, prefill_turns, decode_turns, linger = False, (), (), None
    elif state.phase == "idle":
        cohort += 1
        barrier = state.policy.switch == "barrier"
        linger = now_ns + state.policy.linger_ns if barrier and state.policy.linger_ns else None
    return replace(
        state,
        phase=phase,
        phase_since_ns=now_ns,
        phase_rounds=0,
        phase_groups=(),
        cohort=cohort,
        sealed=sealed,
        prefill_turns=prefill_turns,
        decode_turns=decode_turns,
        linger_until_ns=linger,
    )


def change_policy(state: State, now_ns: int) -> State:
    """R15, with no round in flight."""
    policy = state.policy_pending
    if policy is None:
        return state
    state = replace(
        state,
        policy=policy,
        policy_pending=None,
        phase_since_ns=now_ns,
        phase_rounds=0,
        phase_groups=(),
        sealed=False,
        linger_until_ns=None,
    )
    if policy.switch != "barrier" or state.phase == "idle":
        return state
    seen = outlook(state)
    phase: Phase = "prefill" if seen.prompts or seen.swaps or not seen.active else "decode"
    sealed = any(s is not None and s.role in ("ready", "generating") for s in state.slots)
    return replace(state, phase=phase, cohort=state.cohort + 1, sealed=sealed)
