"""What the next round carries, once the phase is known: pure functions from a state to lanes.

A plan never mixes classes (except under `mixed`), never mixes groups in a compute round (R7), never
asks for more rows than `batch_tokens`, and never writes past the pages a sequence holds (R9).
"""

from msgspec import Struct

from .memory import kept_on_shift
from .policy import can_fork, leaders
from .state import Group, Limits, Pace, Sequence, State, Turn
from .vocabulary import Lane, LaunchReason, Policy, RoundKind, SlotIndex

Seat = tuple[SlotIndex, Sequence]
FILL_MIN = 32  # tokens; below this a prompt would not get anywhere (R10)


class Plan(Struct, frozen=True, gc=False):
    kind: RoundKind
    lanes: tuple[Lane, ...]
    reason: LaunchReason
    group: Group | None = None  # of a compute round
    prefill_tokens: int = 0
    decode_rows: int = 0


# --- prompts --------------------------------------------------------------------------------------


def plan_prefill_class(state: State) -> Plan | None:
    """State that moves goes first (it is what others wait for), then prompts."""
    return plan_moves(state) or plan_prompts(state)


def plan_moves(state: State) -> Plan | None:
    restores: list[Lane] = []
    resumed = False
    saves: list[Lane] = []
    swapped = False
    forks: list[Lane] = []
    child = False
    for slot, s in enumerate(state.slots):
        if s is None:
            continue
        match s.role:
            case "restoring":
                resumed = resumed or s.resume is not None
                restores.append(lane(slot, s, 0, s.length if s.resume else s.cached))
            case "swapping" | "saving":
                swapped = swapped or s.role == "swapping"
                saves.append(lane(slot, s, 0, s.length))
            case "following":
                if s.follow is not None and can_fork(state, s):
                    child = child or s.choice > 0
                    forks.append(lane(slot, s, 0, s.follow.position, source=s.follow.slot))
            case _:
                pass
    if restores:
        return Plan("restore", tuple(restores), "resume_saved" if resumed else "restore_cache")
    if saves:
        return Plan("save", tuple(saves), "free_memory" if swapped else "save_idle")
    if forks:
        return Plan("fork", tuple(forks), "children" if child else "shared_prefix")
    return None


def lane(
    slot: SlotIndex,
    s: Sequence,
    start: int,
    count: int,
    outputs: int = 0,
    source: SlotIndex | None = None,
) -> Lane:
    return Lane(slot, s.request.request_id, s.choice, start, count, outputs, source)


def plan_prompts(state: State) -> Plan | None:
    prompts = sharing(prompts_of(state), state.policy)
    if not prompts:
        return None
    group = next_group(state.prefill_turns, prompts)
    kind = prompt_kind(group)
    fill = fill_limit(state.limits, state.paces, kind)
    room = state.limits.batch_tokens
    lanes = share_prompts(state, of_group(prompts, group), fill, room=room, sampled=False)
    tokens = sum(one.count for one in lanes)
    return Plan(kind, lanes, prefill_reason(state), group, prefill_tokens=tokens)


def prompt_kind(group: Group) -> RoundKind:
    """Of a round that carries prompts of the group and nothing else."""
    return "prefill" if group[1] == "completion" else "encode"


def prefill_reason(state: State) -> LaunchReason:
    match state.policy.switch:
        case "barrier":
            return "cohort_sealed" if state.sealed else "cohort_open"
        case "quantum":
            return "time_slice"
        case "prompts_first":
            return "prompts_first"
        case "mixed":
            return "continuous"


def prompts_of(state: State) -> list[Seat]:
    """Unfinished prompts in planning order: priority, then admission (H22: never slot order)."""
    prompts = [
        (i, s) for i, s in enumerate(state.slots) if s is not None and s.role == "prefilling"
    ]
    prompts.sort(key=lambda seat: (-seat[1].request.priority, seat[1].ticket))
    return prompts


def fill_limit(limits: Limits, paces: tuple[Pace, ...], kind: RoundKind) -> int:
    """Prompt tokens of the next round: the most on a grid of doublings that fits the time (R10)."""
    most = limits.batch_tokens
    if limits.round_ns_max == 0:
        return most
    fill = min(FILL_MIN, most)
    pace = pace_of(paces, kind)
    if pace is None:
        return fill
    while fill < most:
        wider = min(2 * fill, most)
        if wider * pace.duration_ns > limits.round_ns_max * pace.tokens:
            break
        fill = wider
    return fill


def pace_of(paces: tuple[Pace, ...], kind: RoundKind) -> Pace | None:
    for pace in paces:
        if pace.kind == kind:
            return pace
    return None


def share_prompts(
    state: State, prompts: list[Seat], capacity: int, *, room: int, sampled: bool
) -> tuple[Lane, ...]:
    """Lanes of one group's prompts in at most `capacity` tokens, shared as the policy says.

    A prompt that cannot be cut may take more, up to `room`.
    """
    stops = follower_stops(state)
    needs = [next_stop(slot, s, stops) - s.length for slot, s in prompts]
    if state.limits.whole_prompts:
        needs = [s.request.prompt_length - s.length for _, s in prompts]
        shares = whole_shares(needs, capacity, room)
    elif state.policy.share == "fair":
        served = served_of(state.prefill_turns, prompts[0][1].group)
        shares = fair_shares(needs, capacity, served)
    else:
        shares = greedy_shares(needs, capacity)
    led = leaders(state)
    return tuple(
        lane(slot, s, s.length, share, int(sampled and samples_at_end(slot, s, share, led)))
        for (slot, s), share in zip(prompts, shares, strict=True)
        if share
    )


def samples_at_end(slot: SlotIndex, s: Sequence, share: int, led: tuple[SlotIndex, ...]) -> bool:
    """Under `mixed`, the round that ends a prompt also yields its first token."""
    request = s.request
    complete = s.length + share == request.prompt_length
    alone = request.choices == 1 and slot not in led  # else the fork must come first
    return complete and alone and request.kind == "completion" and s.output_limit != 0


def follower_stops(state: State) -> tuple[tuple[SlotIndex, int], ...]:
    """Where leaders must pause, since a fork copies a state as it is at one position."""
    return tuple(
        (s.follow.slot, s.follow.position)
        for s in state.slots
        if s is not None and s.follow is not None
    )


def next_stop(slot: SlotIndex, s: Sequence, stops: tuple[tuple[SlotIndex, int], ...]) -> int:
    end = s.request.prompt_length
    for point in s.request.stop_points:
        if s.length < point < end:
            end = point
            break
    for leader, point in stops:
        if leader == slot and s.length < point < end:
            end = point
    return end


def fair_shares(needs: list[int], capacity: int, rotation: int) -> list[int]:
    """Water-filling: fill = min(capacity, sum of needs); unsatisfied shares differ by at most one.

    The remainder goes to `remainder` unsatisfied prompts from `rotation` on.  Rotating by the
    tokens served so far is an exact round robin while the prompts stay the same, so that nobody
    starves where there are more prompts than tokens.
    """
    shares = [0] * len(needs)
    open_count, left = len(needs), capacity
    for index in sorted_by_need(needs):
        level = left // open_count
        if needs[index] > level:
            break
        shares[index] = needs[index]
        left -= needs[index]
        open_count -= 1
    unsatisfied = [i for i, need in enumerate(needs) if shares[i] < need]
    if not unsatisfied:
        return shares
    level, remainder = divmod(left, open_count)
    for order, index in enumerate(unsatisfied):
        turn = (order - rotation) % len(unsatisfied)
        shares[index] = level + (turn < remainder)
    return shares


def sorted_by_need(needs: list[int]) -> list[int]:
    return sorted(range(len(needs)), key=needs.__getitem__)


def greedy_shares(needs: list[int], capacity: int) -> list[int]:
    shares: list[int] = []
    for need in needs:
        shares.append(min(need, capacity))
        capacity -= shares[-1]
    return shares


def whole_shares(needs: list[int], capacity: int, room: int) -> list[int]:
    """Prompts that cannot be cut, as many as fit; the first goes whatever time it takes (R10).

    Whoever does not fit lets shorter ones pass, and is the first before long: so nobody starves.
    """
    shares: list[int] = []
    left = max(capacity, min(needs[0], room))
    for need in needs:
        shares.append(need if need <= left else 0)
        left -= shares[-1]
    return shares


def sharing(prompts: list[Seat], policy: Policy) -> list[Seat]:
    """Whose prompts may share the next round: everybody's, or under `serial` one owner's.

    The owner keeps the engine until its prompt is complete, and is never topped up by the next.
    """
    if policy.share != "serial" or not prompts:
        return prompts

    def rank(seat: Seat) -> tuple[bool, int]:
        s = seat[1]
        remaining = s.request.prompt_length - s.length if policy.serial_order == "shortest" else 0
        return s.length == s.cached, remaining

    return [min(prompts, key=rank)]  # the first in planning order among equals


# --- tokens ---------------------------------------------------------------------------------------


def plan_samples(state: State, ready: list[Seat]) -> Plan | None:
    """All first tokens that may be drawn, whatever the group: no weights are involved."""
    if not ready:
        return None
    led = leaders(state)
    lanes = tuple(lane(slot, s, s.length, 0, 1) for slot, s in ready if slot not in led)
    if not lanes:
        return None
    reason: LaunchReason = "barrier_opened" if state.policy.switch == "barrier" else "ready"
    return Plan("sample", lanes, reason)


def awake(state: State) -> tuple[list[Seat], list[Seat]]:
    """(ready, generating) sequences whose clients read, in slot order."""
    ready: list[Seat] = []
    running: list[Seat] = []
    for slot, s in enumerate(state.slots):
        if s is None or s.stalled_until_ns is not None:
            continue
        if s.role == "generating":
            running.append((slot, s))
        elif s.role == "ready":
            ready.append((slot, s))
    return ready, running


def plan_shift(state: State, running: list[Seat]) -> Plan | None:
    limits = state.limits
    full = [seat for seat in running if seat[1].length >= limits.context_length]
    lanes = tuple(
        lane(slot, s, keep, (s.length - keep + 1) // 2)
        for slot, s in full
        if (keep := kept_on_shift(limits, s.request)) is not None
    )
    return Plan("shift", lanes, "context_full") if lanes else None


def decode_width(limits: Limits, s: Sequence, lane_count: int) -> int:
    """Rows of one lane: the pending token and its drafts (R14)."""
    drafts = min(
        limits.draft_tokens,
        limits.context_length - s.length - 1,
        (limits.batch_tokens - lane_count) // lane_count,
    )
    if s.output_limit is not None:
        drafts = min(drafts, s.output_limit - s.produced - 1)
    return 1 + max(drafts, 0)


def rows_that_fit(limits: Limits, members: list[Seat], served: int) -> list[Seat]:
    """No more lanes than rows; who sits out rotates with the rows served."""
    most = limits.batch_tokens
    if len(members) <= most:
        return members
    start = served % len(members)
    return sorted((members[start:] + members[:start])[:most], key=lambda seat: seat[0])


# --- groups ---------------------------------------------------------------------------------------


def of_group(seats: list[Seat], group: Group) -> list[Seat]:
    return [seat for seat in seats if seat[1].group == group]


def without_group(seats: list[Seat], group: Group) -> list[Seat]:
    return [seat for seat in seats if seat[1].group != group]


def only_group(seats: list[Seat]) -> Group | None:
    """The group of all these seats, if they have but one: the usual case, so worth a short way."""
    first = seats[0][1].group
    for _, s in seats:
        if s.group != first:
            return None
    return first


def served_of(turns: tuple[Turn, ...], group: Group) -> int:
    for turn in turns:
        if turn.group == group:
            return turn.served
    return 0


def next_group(turns: tuple[Turn, ...], seats: list[Seat]) -> Group:
    """The group that had its turn longest ago, or never; among equals the earliest admitted."""
    only = only_group(seats)
    if only is not None:
        return only
    recency = {turn.group: index for index, turn in enumerate(turns)}
    _, s = min(seats, key=lambda seat: (recency.get(seat[1].group, -1), seat[1].ticket))
    return s.group


def take_turn(state: State, turns: tuple[Turn, ...], group: Group, count: int) -> tuple[Turn, ...]:
    """Count a round of `group` and put it last.  Groups that nobody is seated of are forgotten."""
    if len(turns) == 1 and turns[0].group == group:
        return (Turn(group, turns[0].served + count),)
    present = [s.group for s in state.slots if s is not None]
    others = tuple(turn for turn in turns if turn.group != group and turn.group in present)
    return (*others, Turn(group, served_of(turns, group) + count))
