"""An engine that computes nothing: it says how long a round would take and what it would yield.

What the requests are is told by a `Script`: how many tokens each choice has until its text ends by
itself, and which prompts begin alike.  From that alone follow the tokens of each lane, the end
token and the cached prefix a seat begins with; so every policy serves the same requests in full,
and runs differ only in when.

Speculation.  A draft is accepted with the model's chance, drawn from (seed, request, choice, token
position): where a text is easy to guess it is so under every policy.
"""

from collections.abc import Callable
from typing import Literal, Protocol

from msgspec import Struct
from msgspec.structs import asdict

from phaseloop.core.vocabulary import (
    Failed,
    Lane,
    LaunchRound,
    Produced,
    RequestId,
    Result,
    SeatRequest,
    SlotIndex,
)

from .protocol import Content, Description, EngineDied, Outcome, RoundError, Seated
from .sim_cost import PPM, Cost, duration_ns, jittered_ns
from .sim_draws import successes
from .sim_faults import UNHARMED, Faults

ACCEPT_KEY = 3


class Capacity(Struct, frozen=True, kw_only=True):
    """What the engine can hold, and how it is used unless the operator says otherwise."""

    slot_count: int = 4
    batch_tokens: int = 2048
    step_tokens: int = 1024  # rows between two looks at whether the round was aborted
    context_length: int = 262_144
    page_count: int = 4096
    page_length: int = 256
    draft_tokens: int = 0
    accept_ppm: int = 0  # the chance that a draft is accepted if those before it were
    round_ms: int = 1000  # default of --max-round-ms
    can_save: bool = True
    shares_pages: bool = False
    forks_anywhere: bool = False


class SimModel(Struct, frozen=True):
    """All there is to know about an engine: a name, its size, its costs."""

    name: str
    capacity: Capacity
    cost: Cost


def describe(model: SimModel) -> Description:
    """What an engine of this model can hold."""
    names = set(Description.__struct_fields__) & set(Capacity.__struct_fields__)
    shared = {name: value for name, value in asdict(model.capacity).items() if name in names}
    return Description(name=model.name, **shared)


class Prefix(Struct, frozen=True):
    """The beginning of a prompt that others share: all of one `family` have the same tokens."""

    family: int
    length: int


class Script(Protocol):
    """What is hidden in the requests."""

    def output_length(self, request_id: RequestId, choice: int) -> int | None:
        """Tokens until the text ends by itself; None if it never does."""
        ...

    def prefix(self, request_id: RequestId) -> Prefix | None: ...


class Seat:
    """A sequence's state, in a slot or in host RAM."""

    __slots__ = ("choice", "end", "prefix", "produced", "request_id")

    def __init__(
        self, request_id: RequestId, choice: int, end: int | None, prefix: Prefix | None
    ) -> None:
        self.request_id = request_id
        self.choice = choice
        self.end = end
        self.prefix = prefix
        self.produced = 0


class SimEngine:
    """See engine/protocol.py.  `now_ns` is only for faults that strike at a time."""

    def __init__(
        self,
        model: SimModel,
        script: Script,
        seed: int = 0,
        faults: Faults | None = None,
        now_ns: Callable[[], int] = lambda: 0,
    ) -> None:
        self.model = model
        self._script = script
        self._seed = seed
        self._faults = faults
        self._now_ns = now_ns
        self._slots: dict[SlotIndex, Seat] = {}
        self._cached: dict[SlotIndex, Prefix] = {}  # of slots that were released
        self._saved: dict[tuple[RequestId, int], Seat] = {}

    def describe(self) -> Description:
        return describe(self.model)

    # --- seats ------------------------------------------------------------------------------------

    def seat(self, seat: SeatRequest, content: Content) -> Seated:
        request_id, slot = seat.request_id, seat.slot
        cached = self.cached_length(slot, request_id) if seat.reason not in EMPTY_SEATS else 0
        prefix = self._script.prefix(request_id)
        end = self._script.output_length(request_id, seat.choice)
        self._slots[slot] = Seat(request_id, seat.choice, end, prefix)
        self._cached.pop(slot, None)
        return Seated(cached)

    def cached_length(self, slot: SlotIndex, request_id: RequestId) -> int:
        """How many leading tokens of a request an empty slot holds."""
        held, wanted = self._cached.get(slot), self._script.prefix(request_id)
        if held is None or wanted is None or held.family != wanted.family:
            return 0
        return min(held.length, wanted.length)

    def release(self, slot: SlotIndex, keep: int, version: int) -> None:
        seat = self._slots.pop(slot, None)
        held = self._cached.pop(slot, None) if seat is None else seat.prefix
        if held is not None and keep:
            self._cached[slot] = Prefix(held.family, min(held.length, keep))

    def drop(self, request_id: RequestId, choice: int) -> None:
        self._saved.pop((request_id, choice), None)

    # --- rounds -----------------------------------------------------------------------------------

    def run(self, launch: LaunchRound) -> Outcome:
        struck = UNHARMED
        if self._faults is not None:
            struck = self._faults.at(self._seed, launch.round_id, self._now_ns())
        if struck.engine:
            raise EngineDied(f"injected into round {launch.round_id}")
        length_ns = duration_ns(self.model.cost, launch, self._has_begun)
        length_ns = jittered_ns(self.model.cost, length_ns, self._seed, launch.round_id)
        length_ns = length_ns * struck.factor_ppm // PPM
        if struck.round:
            raise RoundError("injected", length_ns)
        results = self._results(launch, struck.lanes)
        return Outcome(results, duration_ns=length_ns, step_ns=self._step_ns(launch, length_ns))

    def abort(self, round_id: int) -> None:
        """Rounds are over as soon as they are asked for; virtual time uses `step_ns`."""

    def _has_begun(self, lane: Lane) -> bool:
        return self._slots[lane.slot].produced > 0

    def _step_ns(self, launch: LaunchRound, length_ns: int) -> int:
        if launch.kind in ("sample", "decode"):
            return length_ns
        rows = sum(lane.count for lane in launch.lanes)
        steps = max(1, -(-rows // self.model.capacity.step_tokens))
        return -(-length_ns // steps)

    def _results(self, launch: LaunchRound, failing: tuple[int, ...]) -> tuple[Result, ...]:
        match launch.kind:
            case "sample" | "decode" | "mixed":
                results = self._generate(launch.lanes)
            case "save" | "restore":
                results = [
                    self._move(launch.kind, lane, fails=index in failing)
                    for index, lane in enumerate(launch.lanes)
                ]
            case "prefill" | "encode" | "fork" | "shift":
                results = [self._result(lane) for lane in launch.lanes]
        for index in failing:
            if index < len(results):
                results[index] = Failed("injected")
        return tuple(results)

    def _move(self, kind: Literal["save", "restore"], lane: Lane, *, fails: bool) -> Result:
        key = (lane.request_id, lane.choice)
        if kind == "save" and not fails:
            self._saved[key] = self._slots[lane.slot]
        elif kind == "restore" and key in self._saved:
            self._slots[lane.slot] = self._saved.pop(key)
        return NOTHING

    def _result(self, lane: Lane) -> Result:
        return self._tokens(self._slots[lane.slot], lane.outputs) if lane.outputs else NOTHING

    def _generate(self, lanes: tuple[Lane, ...]) -> list[Result]:
        """Tokens of every lane that wants some.  Most lanes want one and get it."""
        slots = self._slots
        results: list[Result] = []
        for lane in lanes:
            seat = slots[lane.slot]
            if lane.outputs == 1 and seat.produced != seat.end:
                seat.produced += 1
                results.append(ONE)
            elif lane.outputs:
                results.append(self._tokens(seat, lane.outputs))
            else:
                results.append(NOTHING)
        return results

    def _tokens(self, seat: Seat, outputs: int) -> Produced:
        """The pending token's successor, and one more per accepted draft, up to the end token."""
        tokens = 1
        if outputs > 1:
            key = (ACCEPT_KEY, self._seed, seat.request_id, seat.choice, seat.produced)
            tokens += successes(self.model.capacity.accept_ppm, outputs - 1, *key)
        if seat.end is not None and seat.produced + tokens > seat.end:
            tokens = seat.end - seat.produced
            seat.produced = seat.end
            return Produced(tokens, finish=True)
        seat.produced += tokens
        return Produced(tokens)


EMPTY_SEATS = ("sibling", "resume")
NOTHING, ONE = Produced(), Produced(1)
