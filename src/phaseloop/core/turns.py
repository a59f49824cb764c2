"""The next launch, with what it needs made ready: pages for its rows, room where there is none."""

from msgspec.structs import replace

from .admission import first_in_line
from .ending import Step, end_choice
from .memory import pages_for, take_pages
from .plan import (
    Plan,
    Seat,
    awake,
    decode_width,
    fill_limit,
    next_group,
    of_group,
    only_group,
    plan_moves,
    plan_prefill_class,
    plan_samples,
    plan_shift,
    prompt_kind,
    prompts_of,
    rows_that_fit,
    served_of,
    share_prompts,
    sharing,
    take_turn,
    without_group,
)
from .policy import Outlook, all_groups_served, leaders
from .state import LIVE, Flight, Group, State, with_slot
from .vocabulary import AnyEffect, Effects, Lane, LaunchRound


def launch_next(state: State, now_ns: int) -> Step:
    if state.phase == "idle" or lingers(state, now_ns):
        return state, ()
    if state.policy.switch == "mixed":
        return launch_mixed(state)
    if state.phase == "prefill":
        if any(s is not None and s.role == "seating" for s in state.slots):
            return state, ()  # answered at once; launching now would leave its prompt behind
        plan = plan_prefill_class(state)
        return (state, ()) if plan is None else launch(state, plan)
    return launch_tokens(state)


def lingers(state: State, now_ns: int) -> bool:
    """A new cohort waits for company, unless nobody more could sit down."""
    until_ns = state.linger_until_ns
    return until_ns is not None and now_ns < until_ns and None in state.slots


def launch(state: State, plan: Plan, evicted: Effects = ()) -> Step:
    flight = Flight(state.round_id_next, plan.kind, plan.lanes)
    prefill_turns, decode_turns, groups = (
        state.prefill_turns,
        state.decode_turns,
        state.phase_groups,
    )
    if plan.group is not None:
        if plan.prefill_tokens or state.policy.switch == "mixed":  # where one order serves both
            prefill_turns = take_turn(state, prefill_turns, plan.group, plan.prefill_tokens)
        if plan.decode_rows:
            decode_turns = take_turn(state, decode_turns, plan.group, plan.decode_rows)
            groups = groups if plan.group in groups else (*groups, plan.group)
    state = replace(
        state,
        flight=flight,
        round_id_next=flight.round_id + 1,
        phase_rounds=state.phase_rounds + 1,
        phase_groups=groups,
        prefill_turns=prefill_turns,
        decode_turns=decode_turns,
        linger_until_ns=None,
    )
    launched = LaunchRound(flight.round_id, plan.kind, plan.lanes, plan.reason)
    return state, (*evicted, launched)


def launch_tokens(state: State) -> Step:
    """First tokens, then a shift where a context is full, then one decode round of one group."""
    ready, running = awake(state)
    plan = plan_samples(state, ready) or plan_shift(state, running)
    if plan is not None:
        return launch(state, plan)
    effects: Effects = ()
    while running:
        group, members = next_members(state, running)
        state, evicted, lanes = decode_lanes(state, members)
        effects += evicted
        if lanes:
            plan = Plan("decode", lanes, "generate", group, decode_rows=len(lanes))
            return launch(state, plan, effects)
        # Held as a whole: it has had its turn, so that it does not keep the phase from ending.
        if group not in state.phase_groups:
            state = replace(state, phase_groups=(*state.phase_groups, group))
        running = without_group(running, group)
    state, ended = make_room(state)
    return state, effects + ended


def launch_mixed(state: State) -> Step:
    """Continuous batching: decode rows first, then prompts greedily in the rows that are left."""
    ready, running = awake(state)
    plan = plan_moves(state) or plan_samples(state, ready) or plan_shift(state, running)
    if plan is not None:
        return launch(state, plan)
    prompts = sharing(prompts_of(state), state.policy)
    if not running and not prompts:
        return state, ()
    group = next_group(state.prefill_turns, running + prompts)
    state, evicted, rows = decode_lanes(state, of_group(running, group))
    alone = prompt_kind(group)
    room = state.limits.batch_tokens - sum(one.count for one in rows)
    fill = min(room, fill_limit(state.limits, state.paces, "mixed" if rows else alone))
    prompts, chunks = of_group(prompts, group), ()
    if prompts and fill > 0:
        chunks = share_prompts(state, prompts, fill, room=room, sampled=True)
    if not rows and not chunks:
        state, ended = make_room(state)
        return state, evicted + ended
    kind = "mixed" if rows and chunks else "decode" if rows else alone
    tokens = sum(one.count for one in chunks)
    plan = Plan(kind, rows + chunks, "continuous", group, tokens, len(rows))
    return launch(state, plan, evicted)


def next_members(state: State, running: list[Seat]) -> tuple[Group, list[Seat]]:
    """First a group that had no round in this phase (R11), then the one whose turn it is."""
    only = only_group(running)
    if only is not None:
        return only, running
    fresh = [seat for seat in running if seat[1].group not in state.phase_groups]
    group = next_group(state.decode_turns, fresh or running)
    return group, of_group(running, group)


def decode_lanes(state: State, members: list[Seat]) -> tuple[State, Effects, tuple[Lane, ...]]:
    """Lanes of one group, with their pages; who finds no page is held back (`no_space`)."""
    if not members:
        return state, (), ()
    limits = state.limits
    members = rows_that_fit(limits, members, served_of(state.decode_turns, members[0][1].group))
    lanes: list[Lane] = []
    growing: list[int] = []
    lane_count, drafts, page_length = len(members), limits.draft_tokens, limits.page_length
    for slot, s in members:
        count = decode_width(limits, s, lane_count) if drafts else 1
        if s.length + count > (s.pages + s.borrowed) * page_length:
            growing.append(len(lanes))
        lanes.append(Lane(slot, s.request.request_id, s.choice, s.length, count, count))
    if not growing:
        return state, (), tuple(lanes)
    effects: list[AnyEffect] = []
    for index in sorted(growing, key=lambda i: members[i][1].ticket):
        state, evicted, lanes[index] = grown(state, lanes[index])
        effects += evicted
    return state, tuple(effects), tuple(one for one in lanes if one.count)


def grown(state: State, one: Lane) -> tuple[State, Effects, Lane]:
    """The lane with the pages it needs, or as many rows of it as fit without."""
    s = state.slots[one.slot]
    assert s is not None
    held = s.pages + s.borrowed
    missing = pages_for(state.limits, one.start + one.count) - held
    taken = take_pages(state, missing)
    if taken is None:
        rows = max(0, held * state.limits.page_length - one.start)
        return state, (), replace(one, count=rows, outputs=rows)
    state, evicted = taken
    return with_slot(state, one.slot, replace(s, pages=s.pages + missing)), evicted, one


def make_room(state: State) -> Step:
    """R9: every sequence is held.  The latest admitted leaves for host RAM, or is truncated."""
    led = leaders(state)
    _, running = awake(state)
    live = [(i, s) for i, s in enumerate(state.slots) if s is not None and s.role in LIVE]
    if any(s.role in ("seating", "swapping") for _, s in live) or not running:
        return state, ()  # somebody is about to move: wait for that
    movable = [
        (i, s)
        for i, s in live
        if s.role in ("generating", "ready", "prefilling")
        and i not in led
        and not (state.limits.shares_pages and s.request.choices > 1)
    ]
    if state.limits.can_save and len(live) > 1 and movable:
        slot, s = max(movable, key=lambda x: (x[1].stalled_until_ns is not None, x[1].ticket))
        swapping = replace(s, role="swapping", resume=s.role, swap_for="memory")
        return with_slot(state, slot, swapping), ()
    slot, _ = max(running, key=lambda seat: seat[1].ticket)
    return end_choice(state, slot, "no_space")


def lend_seat(state: State, seen: Outlook, now_ns: int, seatable: bool) -> State:
    """R11, `seat_quantum_ns`: whoever sat longest makes way for the first in line."""
    policy = state.policy
    if not policy.seat_quantum_ns or policy.switch != "quantum" or not state.limits.can_save:
        return state
    if state.phase != "decode" or seatable or seen.swaps or first_in_line(state) is None:
        return state
    if not all_groups_served(state) or now_ns - state.phase_since_ns < policy.decode_quantum_ns:
        return state
    lendable = [
        (i, s)
        for i, s in enumerate(state.slots)
        if s is not None
        and s.role == "generating"
        and s.request.choices == 1
        and now_ns - s.seated_ns >= policy.seat_quantum_ns
    ]
    if not lendable:
        return state
    slot, s = min(lendable, key=lambda seat: seat[1].ticket)
    return with_slot(state, slot, replace(s, role="swapping", resume=s.role, swap_for="seat"))
