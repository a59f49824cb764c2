"""Deliberate faults in the core, one line each: what the invariants and the scenarios must catch.

`old` must occur exactly once in its file, so that a change of the core that moves it is noticed and
the fault is looked at again.
"""

from msgspec import Struct


class Mutation(Struct, frozen=True):
    name: str  # what the fault does
    file: str
    old: str
    new: str


MUTATIONS = (
    # --- barrier and seal
    Mutation(
        "the barrier opens while a member is unfinished",
        "policy.py",
        '    if prompts or seen.saves:\n        return "prefill"\n',
        '    if (prompts and not seen.active) or seen.saves:\n        return "prefill"\n',
    ),
    Mutation(
        "the seal is forgotten",
        "reduce.py",
        "return replace(state, sealed=True, linger_until_ns=None) if seen.waiting else state",
        "return state",
    ),
    Mutation(
        "a member in prefill seals",
        "reduce.py",
        "linger_until_ns=None) if seen.waiting else state",
        "linger_until_ns=None) if seen.waiting or seen.prompts else state",
    ),
    Mutation(
        "an embedding waits at the barrier and seals",
        "rounds.py",
        '    if s.request.kind != "completion":\n',
        '    if s.request.kind == "rerank":\n',
    ),
    Mutation(
        "a prompt that wants no tokens seals",
        "rounds.py",
        "    if s.output_limit == 0:\n",
        "    if s.output_limit == -1:\n",
    ),
    Mutation(
        "a late arrival joins the sealed cohort",
        "admission.py",
        '(state.phase == "prefill" and not state.sealed)',
        '(state.phase == "prefill")',
    ),
    Mutation(
        "a cancelled member keeps its seat",
        "ending.py",
        '    if sequence.role == "seating" or on_engine(state, slot):\n',
        '    if sequence.role in ("seating", "ready") or on_engine(state, slot):\n',
    ),
    Mutation(
        "a seat is given away while its lane is in flight",
        "ending.py",
        '    if sequence.role == "seating" or on_engine(state, slot):\n',
        '    if sequence.role == "seating":\n',
    ),
    Mutation(
        "a stalled member is waited for",
        "policy.py",
        "            waiting = waiting or s.stalled_until_ns is None\n",
        "            waiting = True\n",
    ),
    Mutation(
        "a parked member is forgotten when its client reads again",
        "reduce.py",
        "return mark_stalled(replace(state, timers=timers), request_id, None)",
        "return replace(state, timers=timers)",
    ),
    Mutation(
        "a stall does not park",
        "plan.py",
        "        if s is None or s.stalled_until_ns is not None:\n",
        "        if s is None:\n",
    ),
    # --- shares and groups
    Mutation(
        "one token too many is shared out",
        "plan.py",
        "(turn < remainder)",
        "(turn <= remainder)",
    ),
    Mutation(
        "the remainder does not rotate",
        "plan.py",
        "turn = (order - rotation) % len(unsatisfied)",
        "turn = order",
    ),
    Mutation(
        "small needs are not satisfied first",
        "plan.py",
        "return sorted(range(len(needs)), key=needs.__getitem__)",
        "return list(range(len(needs)))",
    ),
    Mutation(
        "a lower priority is computed first",
        "plan.py",
        "key=lambda seat: (-seat[1].request.priority, seat[1].ticket)",
        "key=lambda seat: (seat[1].request.priority, seat[1].ticket)",
    ),
    Mutation(
        "a group has the next turn again",
        "plan.py",
        "return (*others, Turn(group, served_of(turns, group) + count))",
        "return (Turn(group, served_of(turns, group) + count), *others)",
    ),
    Mutation(
        "a serial owner is topped up",
        "plan.py",
        '    if policy.share != "serial" or not prompts:\n',
        '    if policy.share != "serial" or len(prompts) < 3:\n',
    ),
    Mutation(
        "a chunk runs past its stop point",
        "plan.py",
        "        if s.length < point < end:\n            end = point\n            break\n",
        "        if s.length < point < end - 1:\n            end = point + 1\n            break\n",
    ),
    Mutation(
        "drafts overfill the round",
        "plan.py",
        "(limits.batch_tokens - lane_count) // lane_count",
        "limits.batch_tokens // lane_count",
    ),
    # --- memory
    Mutation(
        "a released seat frees a page too many",
        "ending.py",
        "pages_free=state.pages_free + owned - pages,",
        "pages_free=state.pages_free + owned - pages + 1,",
    ),
    Mutation(
        "a page is taken one row too late",
        "turns.py",
        "s.length + count > (s.pages + s.borrowed) * page_length",
        "s.length + count > (s.pages + s.borrowed) * page_length + 1",
    ),
    Mutation(
        "the newest cache is evicted",
        "memory.py",
        "    slot = min(\n",
        "    slot = max(\n",
    ),
    Mutation(
        "the earliest admitted is held",
        "turns.py",
        "key=lambda i: members[i][1].ticket",
        "key=lambda i: -members[i][1].ticket",
    ),
    Mutation(
        "the queue overtakes who made room",
        "admission.py",
        '    if saved.cause == "memory" or queued is None:\n',
        "    if queued is None:\n",
    ),
    Mutation(
        "a child's shared pages are lost when its parent ends first",
        "ending.py",
        "return with_slot(state, i, owner), sequence.pages - heir.borrowed",
        "return with_slot(state, i, owner), sequence.pages",
    ),
    Mutation(
        "a moved candidate is used",
        "admission.py",
        "return cache.version == candidate.version and candidate.length <= cache.length",
        "return candidate.length <= cache.length",
    ),
    Mutation(
        "a wholly cached prompt computes nothing",
        "reduce.py",
        "min(event.cached_length, s.request.prompt_length - 1)",
        "min(event.cached_length, s.request.prompt_length)",
    ),
    Mutation(
        "a request ends while a choice of it is in host RAM",
        "ending.py",
        "    ) or any(saved.sequence.request.request_id == request_id for saved in state.saved)\n",
        "    )\n",
    ),
    Mutation(
        "the copy of a cancelled sequence stays in host RAM",
        "rounds.py",
        '    if flight.kind == "save":\n        dropped',
        '    if flight.kind == "shift":\n        dropped',
    ),
    Mutation(
        "a shifted context is kept as cache",
        "memory.py",
        "    if sequence.produced and sequence.length < unshifted:\n",
        "    if sequence.length < 0:\n",
    ),
    Mutation(
        "a shifted context is kept as far as the request asked",
        "memory.py",
        "        return min(sequence.length, kept_on_shift(limits, request) or 0)\n",
        "        return min(sequence.length, request.shift_keep or 0)\n",
    ),
    Mutation(
        "a leader's context may have been shifted",
        "sharing.py",
        " and not passed and not shifted\n",
        " and not passed\n",
    ),
    Mutation(
        "whoever could follow restores less instead",
        "reduce.py",
        "    if follow is not None:  # worth",
        "    if follow is not None and not restore:  # worth",
    ),
    Mutation(
        "what a held sequence waits for is given to a newcomer",
        "admission.py",
        "        reservation_of_all(state.limits, request) <= pages_spare(state)\n",
        "        reservation_of_all(state.limits, request) <= pages_spare(state) + 1\n",
    ),
    # --- children and shared prefixes
    Mutation(
        "a child is forked before its parent's prompt is complete",
        "policy.py",
        "    reached = leader.length == follow.position\n",
        "    reached = leader.length >= follow.position // 2\n",
    ),
    Mutation(
        "a parent's end leaves its children waiting",
        "ending.py",
        "    if request.choices > 1 and has_waiting_children(state, sequence):\n",
        "    if request.choices > 9 and has_waiting_children(state, sequence):\n",
    ),
    Mutation(
        "a leader runs past its followers",
        "plan.py",
        "        if leader == slot and s.length < point < end:\n",
        "        if leader == slot and s.length < point - 99 < end:\n",
    ),
    # --- rounds and endings
    Mutation(
        "an answer to another round is taken for this one's",
        "rounds.py",
        "    if flight is None or event.round_id != flight.round_id:\n"
        "        return state, ()  # R1: not the round in flight\n",
        "    if flight is None:\n        return state, ()\n",
    ),
    Mutation(
        "one token past the limit",
        "rounds.py",
        "    if limit is not None and s.produced + tokens >= limit:\n",
        "    if limit is not None and s.produced + tokens > limit:\n",
    ),
    Mutation(
        "rejected drafts stay in the cache",
        "rounds.py",
        'rows = max(tokens, 1) if s.role == "generating" else lane.count',
        "rows = lane.count",
    ),
    Mutation(
        "a deadline is missed by a nanosecond",
        "reduce.py",
        "    while timer is not None and timer[0] <= event.at_ns:\n",
        "    while timer is not None and timer[0] < event.at_ns:\n",
    ),
    Mutation(
        "a timer outlives its request",
        "ending.py",
        "    if stalled_until_ns is not None:\n        timers = ordered.remove(",
        "    if stalled_until_ns == 0:\n        timers = ordered.remove(",
    ),
    Mutation(
        "an abandoned round is aborted twice",
        "reduce.py",
        "    if flight.aborted or any(",
        "    if any(",
    ),
    Mutation(
        "tokens are delivered before the next launch",
        "reduce.py",
        "    DeliverTokens: 2,\n",
        "    DeliverTokens: 1,\n",
    ),
    # --- phases
    Mutation(
        "a prefill slice never ends",
        "policy.py",
        "over = state.phase_rounds > 0 and elapsed_ns >= state.policy.prefill_quantum_ns",
        "over = False",
    ),
    Mutation(
        "a decode slice never ends",
        "policy.py",
        "over = all_groups_served(state) and elapsed_ns >= state.policy.decode_quantum_ns",
        "over = False",
    ),
    Mutation(
        "a decode slice ends before each group had its round",
        "policy.py",
        "over = all_groups_served(state) and elapsed_ns",
        "over = elapsed_ns",
    ),
    Mutation(
        "the latest seated makes way, not who sat longest",
        "turns.py",
        "    slot, s = min(lendable,",
        "    slot, s = max(lendable,",
    ),
    Mutation(
        "whoever lends its seat leaves one round late",
        "reduce.py",
        "    if lent is not state:\n",
        "    state = lent\n    if lent.stopped:\n",
    ),
    Mutation(
        "two sequences have one ticket",
        "admission.py",
        "replace(with_slot(state, slot, sequence), ticket_next=state.ticket_next + 1)",
        "with_slot(state, slot, sequence)",
    ),
    Mutation(
        "embeddings are prompts of completions under mixed",
        "turns.py",
        "    alone = prompt_kind(group)\n",
        '    alone = "prefill"\n',
    ),
    Mutation(
        "a prompt that is one piece is cut",
        "plan.py",
        "shares.append(need if need <= left else 0)",
        "shares.append(min(need, left))",
    ),
    Mutation(
        "a piece larger than a round is queued for ever",
        "admission.py",
        "    if limits.whole_prompts and request.prompt_length > limits.batch_tokens:\n",
        "    if limits.whole_prompts and request.prompt_length > limits.context_length:\n",
    ),
    Mutation(
        "a policy change does not wait for the round",
        "reduce.py",
        "return replace(state, policy_pending=event.policy), ()",
        "return replace(state, policy=event.policy), ()",
    ),
    Mutation(
        "a cohort waits for company that could not sit down",
        "turns.py",
        "return until_ns is not None and now_ns < until_ns and None in state.slots",
        "return until_ns is not None and now_ns < until_ns",
    ),
    Mutation(
        "a server that shuts down takes new work",
        "admission.py",
        "    if state.stopped or state.shutdown_at_ns is not None:\n",
        "    if state.stopped:\n",
    ),
)
