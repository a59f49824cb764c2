"""What hypothesis draws for the core: engines, policies, requests, and how rounds go.

Sizes are small and limits tight, so that every limit is met often: prompts that need several
rounds, pages that run out, queues that overflow, contexts that end, quanta that expire.
"""

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from msgspec.structs import replace

from phaseloop.core.policy import PRESETS
from phaseloop.core.state import Limits, State
from phaseloop.core.vocabulary import (
    Candidate,
    Failed,
    Lane,
    Policy,
    Produced,
    Request,
    RequestId,
    Result,
    Shared,
)

MS = 1_000_000
milliseconds = st.sampled_from([0, 1, 10, 60]).map(lambda ms: ms * MS)


@st.composite
def engines(draw: DrawFn) -> Limits:
    return Limits(
        slot_count=draw(st.integers(1, 4)),
        batch_tokens=draw(st.sampled_from([2, 3, 8, 16])),
        context_length=draw(st.sampled_from([16, 64])),
        page_count=draw(st.integers(6, 40)),
        page_length=draw(st.sampled_from([2, 4, 8])),
        draft_tokens=draw(st.sampled_from([0, 0, 2])),
        output_reserve=draw(st.sampled_from([2, 8])),
        queue_length_max=draw(st.integers(1, 6)),
        round_ns_max=draw(st.sampled_from([0, 0, 20 * MS])),
        client_stall_ns=100 * MS,
        shutdown_grace_ns=80 * MS,
        can_save=draw(st.booleans()),
        save_idle=draw(st.booleans()) and draw(st.booleans()),
        shares_pages=draw(st.booleans()),
        forks_anywhere=draw(st.booleans()),
        share_length_min=draw(st.sampled_from([2, 4])),
        whole_prompts=draw(st.booleans()) and draw(st.booleans()),
    )


@st.composite
def policies(draw: DrawFn) -> Policy:
    policy = draw(st.sampled_from(list(PRESETS.values())))
    if policy.switch == "quantum":
        quanta = [draw(st.sampled_from([0, 15, 40])) * MS for _ in range(2)]
        policy = replace(policy, decode_quantum_ns=quanta[0], prefill_quantum_ns=quanta[1])
        return replace(policy, seat_quantum_ns=draw(st.sampled_from([0, 30])) * MS)
    if policy.switch == "barrier":
        policy = replace(policy, linger_ns=draw(st.sampled_from([0, 0, 30])) * MS)
    if policy.share == "serial":
        return replace(policy, serial_order=draw(st.sampled_from(["fifo", "shortest"])))
    return policy


@st.composite
def requests(draw: DrawFn, request_id: RequestId, state: State) -> Request:
    completion = draw(st.sampled_from([True, True, True, False]))
    request = Request(
        request_id,
        draw(st.integers(1, 20)),
        kind="completion" if completion else draw(st.sampled_from(["embedding", "rerank"])),
        output_limit=draw(st.sampled_from([None, 0, 1, 3, 6, 30])),
        choices=draw(st.sampled_from([1, 1, 2, 3])) if completion else 1,
        priority=draw(st.sampled_from([0, 0, 1])),
        adapter=draw(st.sampled_from([0, 0, 1])),
        stop_points=draw(st.sampled_from([(), (), (3, 7)])),
        keep_cache=draw(st.booleans()),
    )
    if draw(st.booleans()):
        return request
    return replace(
        request,
        deadline_after_ns=draw(st.sampled_from([None, 50 * MS, 200 * MS])),
        queue_wait_ns_max=draw(st.sampled_from([None, 30 * MS])),
        slot_hint=draw(st.sampled_from([None, 0, 7])),
        shift_keep=draw(st.sampled_from([None, 0, 2])),
        candidates=draw(candidates(state)),
        shared=draw(leaders(request_id)),
    )


@st.composite
def candidates(draw: DrawFn, state: State) -> tuple[Candidate, ...]:
    """What a shell could have found: what a free slot holds, something outdated, a snapshot."""
    slot = draw(st.integers(0, len(state.slots) - 1))
    cache = state.caches[slot]
    choices = [(), (Candidate("snapshot", 3, 0, draw(st.integers(1, 9))),)]
    if cache.length and state.slots[slot] is None:
        choices.append((Candidate("slot", slot, cache.version, cache.length),))
    if cache.version:
        choices.append((Candidate("slot", slot, cache.version - 1, 5),))
    return draw(st.sampled_from(choices))


@st.composite
def leaders(draw: DrawFn, request_id: RequestId) -> tuple[Shared, ...]:
    if not request_id:
        return ()
    earlier = st.integers(max(0, request_id - 4), request_id - 1)
    return tuple(draw(st.lists(st.builds(Shared, earlier, st.integers(2, 15)), max_size=2)))


@st.composite
def results(draw: DrawFn, lanes: tuple[Lane, ...]) -> tuple[Result, ...]:
    """One per lane, mostly good; now and then an end token, a failure, or nonsense."""
    return tuple(draw(st.one_of(good(lane), good(lane), good(lane), bad(lane))) for lane in lanes)


def good(lane: Lane) -> st.SearchStrategy[Result]:
    if not lane.outputs:
        return st.just(Produced(0))
    return st.builds(Produced, st.integers(1, lane.outputs), st.just(False))


def bad(lane: Lane) -> st.SearchStrategy[Result]:
    endings: list[Result] = [Failed("drawn"), Produced(lane.outputs + 1), Produced(0)]
    if lane.outputs:
        endings += [Produced(0, True), Produced(lane.outputs, True), Produced(1, True)]
    return st.sampled_from(endings)
