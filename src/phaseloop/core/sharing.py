"""R18: prompts of one cohort that begin alike compute the common part once.

A follower waits until its leader stands at the common position, then forks there.  Leaders are
always earlier requests, so nobody waits in a circle.
"""

from msgspec.structs import replace

from .memory import intact_length
from .state import Follow, Sequence, State, with_slot

CAN_LEAD = ("seating", "restoring", "following", "prefilling", "ready", "generating")


def choose_leader(state: State, follower: Sequence) -> Follow | None:
    """The seated request that saves this one the most prompt tokens, if any saves enough."""
    request, best = follower.request, None
    if state.limits.whole_prompts:
        return None  # its rows see those after them: no two beginnings are alike
    for shared in request.shared:
        if shared.request_id >= request.request_id:
            continue
        for slot, leader in enumerate(state.slots):
            if leader is None or leader.request.request_id != shared.request_id:
                continue
            # At least one token of the follower's own prompt is left to compute.
            position = min(shared.length, request.prompt_length - 1, leader.request.prompt_length)
            follow = Follow(slot, shared.request_id, position)
            saves = position - follower.cached
            if saves < state.limits.share_length_min or (best and position <= best.position):
                continue
            if leader.choice == 0 and leader.group == follower.group and leads(state, follow):
                best = follow
    return best


def leads(state: State, follow: Follow) -> bool:
    """Whether the leader is still there and can still be forked at the agreed position."""
    leader = state.slots[follow.slot]
    if leader is None or leader.request.request_id != follow.request_id:
        return False
    passed = leader.length > follow.position and not state.limits.forks_anywhere
    shifted = intact_length(state.limits, leader) < min(leader.length, follow.position)
    return leader.role in CAN_LEAD and leader.resume is None and not passed and not shifted


def refollow(state: State) -> State:
    """Followers whose leader left, or went past them, find another or compute for themselves."""
    for slot, s in enumerate(state.slots):
        if s is None or s.role != "following" or s.follow is None or s.choice > 0:
            continue
        if not leads(state, s.follow):
            follow = choose_leader(state, s)
            role = "prefilling" if follow is None else "following"
            state = with_slot(state, slot, replace(s, role=role, follow=follow))
    return state
