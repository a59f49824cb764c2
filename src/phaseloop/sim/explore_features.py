"""The worlds that the explorer visits: one small alphabet per feature of the policy.

One run per feature, since their product is out of reach.  A setting is a root state, the world
around it, and the number of answers within which everybody must have ended.  Sizes are chosen so
that limits are exceeded by one where that is the point: prompts that do not fit one round, a queue
that overflows, pages that run out, a request with more choices than slots.

Prompts are short or long: alone, they take one round or `prompt_rounds`.  A round has one token
more than there are slots, so that shares must be rounded.
"""

from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import replace

from phaseloop.core.admission import unfit
from phaseloop.core.plan import FILL_MIN
from phaseloop.core.policy import PRESETS
from phaseloop.core.state import Limits, State, initial
from phaseloop.core.vocabulary import Policy, Request, Shared

from .enabled import TICK_NS, Alphabet, World

PAGE_LENGTH = 2


class Bounds(Struct, frozen=True):
    """How much may happen.  Tokens are those of one answer."""

    slots: int = 2
    requests: int = 3
    prompt_rounds: int = 2
    tokens: int = 2
    cancels: int = 1
    failures: int = 1

    @property
    def batch_tokens(self) -> int:
        return self.slots + 1

    @property
    def short(self) -> int:
        """Tokens of a prompt that leaves room in its round."""
        return self.batch_tokens - 1

    @property
    def long(self) -> int:
        return self.batch_tokens * (self.prompt_rounds - 1) + 1


class Setting(Struct, frozen=True):
    """Where an exploration starts, and how many answers it may take until everybody has ended."""

    state: State
    world: World
    bound: int


Build = Callable[[Bounds, Policy], Setting]


def setting(feature: str, bounds: Bounds, policy: Policy) -> Setting:
    """The world of a feature, a key of FEATURES, under a policy; time slices become a tick."""
    return FEATURES[feature](bounds, in_ticks(policy))


def in_ticks(policy: Policy) -> Policy:
    if policy.switch != "quantum":
        return policy
    return replace(policy, decode_quantum_ns=TICK_NS, prefill_quantum_ns=TICK_NS)


def roomy(bounds: Bounds) -> Limits:
    """An engine that never runs out of anything but slots."""
    context = max(bounds.short, bounds.long) + bounds.tokens + 1
    return Limits(
        slot_count=bounds.slots,
        batch_tokens=bounds.batch_tokens,
        context_length=context,
        page_count=bounds.slots * -(-context // PAGE_LENGTH),
        page_length=PAGE_LENGTH,
        output_reserve=1,
        queue_length_max=bounds.requests,
        client_stall_ns=TICK_NS,
        shutdown_grace_ns=TICK_NS,
        share_length_min=1,
    )


def completion(bounds: Bounds, prompt_length: int) -> Request:
    return Request(
        request_id=0,
        prompt_length=prompt_length,
        output_limit=bounds.tokens,
        keep_cache=False,
    )


def assemble(
    bounds: Bounds, limits: Limits, policy: Policy, alphabet: Alphabet, extras: int = 0
) -> Setting:
    world = World(alphabet, bounds.requests, bounds.cancels, bounds.failures, extras)
    bound = bound_of(bounds, limits, alphabet, extras + bounds.requests * (policy.linger_ns > 0))
    return Setting(initial(limits, policy), world, bound)


def alphabet_of(*requests: Request, together: tuple[tuple[int, ...], ...] = ()) -> Alphabet:
    """Each request may arrive alone; some also in one call."""
    return Alphabet(requests, (*((i,) for i in range(len(requests))), *together))


def bound_of(bounds: Bounds, limits: Limits, alphabet: Alphabet, timers: int) -> int:
    """Answers that must suffice for every request of the bounds to end.

    Every answer moves somebody on: a full round takes as many prompt tokens as fit, any other ends
    the chunk of one prompt at least, and so on.  So the bound is the work of the costliest request
    that is not refused, times their number.  Whoever needs more has found an answer that does
    nothing for anybody.
    """
    taken = [request for request in alphabet.requests if unfit(limits, request) is None]
    work = max(work_of(request, limits, alphabet) for request in taken)
    prompts = bounds.requests * max(request.prompt_length for request in taken)
    narrowest = min(limits.batch_tokens, FILL_MIN) if limits.round_ns_max else limits.batch_tokens
    return bounds.requests * work + prompts // narrowest + timers


def work_of(request: Request, limits: Limits, alphabet: Alphabet) -> int:
    """Answers that one request can take up, apart from full prompt rounds."""
    chunks = 1 + len(request.stop_points) + len(request.shared)
    room = limits.context_length - request.prompt_length
    tokens = room if request.output_limit is None else request.output_limit
    per_choice = 1 + 1 + tokens  # a seat, a first token, the others
    per_choice += limits.save_idle
    if limits.can_save:
        per_choice += 3 * (tokens + 1)  # out, a seat again, and back, at most once per token
    if request.shift_keep is not None:
        per_choice += tokens
    forks = request.choices - 1 + len(request.shared)
    restores = bool(alphabet.snapshots)
    waits = (request.deadline_after_ns, request.queue_wait_ns_max)
    timers = sum(wait is not None for wait in waits) + alphabet.stalls
    return chunks + request.choices * per_choice + forks + restores + timers


# --- the features ---------------------------------------------------------------------------------


def base(bounds: Bounds, policy: Policy) -> Setting:
    """Prompts and answers of several lengths; cancels, stop strings, failed lanes and rounds."""
    short, long = completion(bounds, bounds.short), completion(bounds, bounds.long)
    alphabet = alphabet_of(short, long, replace(short, output_limit=1), together=((0, 1),))
    return assemble(bounds, roomy(bounds), policy, alphabet)


def children(bounds: Bounds, policy: Policy) -> Setting:
    """Two choices for one prompt that share its pages; one choice more than there are slots."""
    short, long = completion(bounds, bounds.short), completion(bounds, bounds.long)
    alphabet = alphabet_of(
        short,
        replace(long, choices=2, keep_cache=True),
        replace(short, choices=bounds.slots + 1),
    )
    return assemble(bounds, replace(roomy(bounds), shares_pages=True), policy, alphabet)


def groups(bounds: Bounds, policy: Policy) -> Setting:
    """Two adapter sets, which share a cohort but never a round."""
    short, long = completion(bounds, bounds.short), completion(bounds, bounds.long)
    return assemble(bounds, roomy(bounds), policy, alphabet_of(short, replace(long, adapter=1)))


def embeddings(bounds: Bounds, policy: Policy) -> Setting:
    """Tasks that wait at no barrier: an embedding, a rerank, a prompt that only fills the cache."""
    short, long = completion(bounds, bounds.short), completion(bounds, bounds.long)
    alphabet = alphabet_of(
        long,
        replace(long, kind="embedding", output_limit=None),
        replace(short, kind="rerank", output_limit=None),
        replace(short, output_limit=0),
    )
    return assemble(bounds, roomy(bounds), policy, alphabet)


def whole(bounds: Bounds, policy: Policy) -> Setting:
    """Prompts that no round may cut: two fit into one, two do not, one never does."""
    long = completion(bounds, bounds.long)
    embedding = replace(long, kind="embedding", output_limit=None)
    limits = replace(
        roomy(bounds),
        batch_tokens=2 * bounds.short,
        context_length=2 * bounds.short + 1,
        page_count=bounds.slots * -(-(2 * bounds.short + 1) // PAGE_LENGTH),
        whole_prompts=True,
    )
    alphabet = alphabet_of(
        replace(embedding, prompt_length=bounds.short),
        replace(embedding, prompt_length=bounds.short + 1),
        replace(embedding, prompt_length=2 * bounds.short + 1),
    )
    return assemble(bounds, limits, policy, alphabet)


def stalls(bounds: Bounds, policy: Policy) -> Setting:
    """Clients that stop reading, twice, and read again or do not."""
    short, long = completion(bounds, bounds.short), completion(bounds, bounds.long)
    alphabet = replace(alphabet_of(short, long), stalls=True)
    return assemble(bounds, roomy(bounds), policy, alphabet, extras=2)


def policy_change(bounds: Bounds, policy: Policy) -> Setting:
    """Two changes to any preset, at any moment."""
    long = completion(bounds, bounds.long)
    others = tuple(in_ticks(preset) for preset in PRESETS.values())
    alphabet = replace(alphabet_of(long), policies=others)
    return assemble(bounds, roomy(bounds), policy, alphabet, extras=2)


def deadlines(bounds: Bounds, policy: Policy) -> Setting:
    """Deadlines, a limited wait in a short queue, and cohorts that wait a tick for company."""
    short, long = completion(bounds, bounds.short), completion(bounds, bounds.long)
    alphabet = alphabet_of(
        replace(short, deadline_after_ns=2 * TICK_NS),
        replace(long, queue_wait_ns_max=TICK_NS),
        together=((0, 1),),
    )
    limits = replace(roomy(bounds), queue_length_max=max(1, bounds.requests - 2))
    if policy.switch == "barrier":
        policy = replace(policy, linger_ns=TICK_NS)
    return assemble(bounds, limits, policy, alphabet)


def memory(bounds: Bounds, policy: Policy) -> Setting:
    """Too few pages: caches are evicted, sequences held and at last truncated; one never fits."""
    largest = max(bounds.short, bounds.long)
    twins = replace(completion(bounds, largest), choices=2)
    alphabet = alphabet_of(*hungry(bounds), twins)
    return assemble(bounds, tight(bounds), policy, alphabet)


def save(bounds: Bounds, policy: Policy) -> Setting:
    """Too few pages, with a host to move sequences and caches to; seats are lent by the tick."""
    limits = replace(tight(bounds), can_save=True, save_idle=True)
    if policy.switch == "quantum":
        policy = replace(policy, seat_quantum_ns=TICK_NS)
    return assemble(bounds, limits, policy, alphabet_of(*hungry(bounds)))


def tight(bounds: Bounds) -> Limits:
    """Pages of one token: enough for the longest sequence and for one more prompt and a token."""
    limits = roomy(bounds)
    context = max(bounds.short, bounds.long) + bounds.tokens
    return replace(
        limits,
        context_length=context,
        page_length=1,
        page_count=context + bounds.short,
    )


def hungry(bounds: Bounds) -> tuple[Request, ...]:
    """Requests that state no limit, and leave their state behind."""
    short, long = completion(bounds, bounds.short), completion(bounds, bounds.long)
    return (
        replace(short, output_limit=None, keep_cache=True),
        replace(long, output_limit=None, keep_cache=True),
    )


def shared_prefix(bounds: Bounds, policy: Policy) -> Setting:
    """Prompts that begin like those before them; a fork takes a state as it stands."""
    return assemble(bounds, roomy(bounds), policy, alike(bounds))


def shared_anywhere(bounds: Bounds, policy: Policy) -> Setting:
    """The same, where a state can be forked at any earlier position."""
    return assemble(bounds, replace(roomy(bounds), forks_anywhere=True), policy, alike(bounds))


def alike(bounds: Bounds) -> Alphabet:
    short, long = completion(bounds, bounds.short), completion(bounds, bounds.long)
    common = (Shared(-1, bounds.short - 1), Shared(-2, bounds.short - 1))
    return alphabet_of(short, replace(long, shared=common))


def shutdown(bounds: Bounds, policy: Policy) -> Setting:
    """A shutdown, a second one, or the loss of the engine."""
    short, long = completion(bounds, bounds.short), completion(bounds, bounds.long)
    alphabet = replace(alphabet_of(short, long), shutdown=True, engine_loss=True)
    return assemble(bounds, roomy(bounds), policy, alphabet, extras=2)


def priorities(bounds: Bounds, policy: Policy) -> Setting:
    """Two classes, and a call that brings one of each; serial policies take the shortest first."""
    short, long = completion(bounds, bounds.short), completion(bounds, bounds.long)
    alphabet = alphabet_of(long, replace(short, priority=1), together=((0, 1),))
    if policy.share == "serial":
        policy = replace(policy, serial_order="shortest")
    return assemble(bounds, roomy(bounds), policy, alphabet)


def caching(bounds: Bounds, policy: Policy) -> Setting:
    """Prefixes in free slots and in host RAM, found or not; hints at slots; stops in a prompt."""
    short, long = completion(bounds, bounds.short), completion(bounds, bounds.long)
    hints = (replace(short, slot_hint=slot) for slot in range(bounds.slots))
    alphabet = replace(
        alphabet_of(replace(long, keep_cache=True, stop_points=(1,)), *hints),
        caching=True,
        snapshots=(bounds.short - 1,),
    )
    return assemble(bounds, roomy(bounds), policy, alphabet)


def drafts(bounds: Bounds, policy: Policy) -> Setting:
    """One draft per lane, accepted or not, where rows and limit leave room for it."""
    short = replace(completion(bounds, bounds.short), output_limit=bounds.tokens + 1)
    limits = replace(roomy(bounds), draft_tokens=1)
    return assemble(bounds, limits, policy, alphabet_of(short))


def shift(bounds: Bounds, policy: Policy) -> Setting:
    """Answers that outgrow the context, of which the middle is dropped."""
    short = completion(bounds, bounds.short)
    limits = replace(roomy(bounds), context_length=bounds.short + 1)
    alphabet = alphabet_of(short, replace(short, shift_keep=1, output_limit=bounds.tokens + 2))
    return assemble(bounds, limits, policy, alphabet)


def pace(bounds: Bounds, policy: Policy) -> Setting:
    """Rounds bounded in time, on an engine that is now fast and now slow."""
    limits = replace(
        roomy(bounds),
        batch_tokens=2 * FILL_MIN,
        context_length=4 * FILL_MIN * bounds.prompt_rounds,
        page_length=FILL_MIN,
        page_count=4 * bounds.slots * bounds.prompt_rounds,
        round_ns_max=TICK_NS,
    )
    prompt = completion(bounds, 2 * FILL_MIN * bounds.prompt_rounds)
    alphabet = replace(alphabet_of(prompt), durations_ns=(TICK_NS // 2, TICK_NS))
    return assemble(bounds, limits, policy, alphabet)


FEATURES: dict[str, Build] = {
    "base": base,
    "children": children,
    "groups": groups,
    "embeddings": embeddings,
    "whole": whole,
    "stalls": stalls,
    "policy-change": policy_change,
    "deadlines": deadlines,
    "memory": memory,
    "save": save,
    "shared-prefix": shared_prefix,
    "shared-anywhere": shared_anywhere,
    "shutdown": shutdown,
    "priorities": priorities,
    "caching": caching,
    "drafts": drafts,
    "shift": shift,
    "pace": pace,
}
