"""An engine and its clients as seen from outside: what must hold whatever the core's state says.

`Shadow.observe(event, effects)` never looks at State.  It keeps its own books of seats, lengths,
saved sequences and answers, and asserts that every effect fits them.  So a fault in the reducer
that its own invariants share (a wrong length, a lost version) shows up here.
"""

from phaseloop.core.state import Limits
from phaseloop.core.vocabulary import (
    DECODE_CLASS,
    PREFILL_CLASS,
    AbortRound,
    AnyEffect,
    AnyEvent,
    DeliverTokens,
    DropSaved,
    Effects,
    EngineLost,
    FinishChoice,
    FinishRequest,
    Lane,
    LaunchRound,
    PolicyChanged,
    Produced,
    ReleaseSlot,
    Request,
    RequestArrived,
    RequestSeated,
    RoundCompleted,
    RoundFailed,
    SeatRequest,
    Stop,
)

Name = tuple[int, int]  # (request, choice)
COMPUTE = ("prefill", "encode", "decode", "mixed")


class Seat:
    """One slot's occupant: `length` is None until the shell has answered the SeatRequest."""

    def __init__(self, name: Name, request: Request) -> None:
        self.name = name
        self.request = request
        self.length: int | None = None
        self.to_restore: int | None = None  # tokens that a restore round must bring back


class Shadow:
    def __init__(self, limits: Limits, *, mixes: bool) -> None:
        self.limits = limits
        self.mixes = mixes  # whether a policy without exclusion was ever in force
        self.requests: dict[int, Request] = {}
        self.seats: dict[int, Seat] = {}
        self.saved: dict[Name, int] = {}
        self.versions: dict[int, int] = {}
        self.flight: LaunchRound | None = None
        self.round_id_last = -1
        self.aborted: set[int] = set()
        self.delivered: dict[Name, int] = {}
        self.leaving_for_ram: set[Name] = set()  # live lanes of the last launch, if it is a save
        self.spoke: set[Name] = set()  # choices that some round has yielded a token of
        self.ended_choices: set[Name] = set()
        self.ending: set[Name] = set()  # and those that end in the present step
        self.answered: set[int] = set()
        self.stopped = False

    def observe(self, event: AnyEvent, effects: Effects) -> None:
        completed = self.take(event)
        self.ending = self.ended_choices | {
            (e.request_id, e.choice) for e in effects if isinstance(e, FinishChoice)
        }
        for effect in effects:
            self.perform(effect, completed)
        if isinstance(event, RequestArrived) and self.stopped:
            unanswered = set(self.requests) - self.answered
            assert not unanswered, f"requests {unanswered} arrived after the stop, unanswered"

    def assert_drained(self) -> None:
        """Every request was answered and nothing of any is left on the engine or in host RAM."""
        unanswered = set(self.requests) - self.answered
        assert not unanswered, f"requests {unanswered} were never answered"
        assert self.stopped or not self.seats, f"slots {sorted(self.seats)} were never released"
        assert self.stopped or not self.saved, f"{sorted(self.saved)} were left in host RAM"

    # --- events -----------------------------------------------------------------------------------

    def take(self, event: AnyEvent) -> dict[Name, int]:
        """Note what the world did; the tokens per choice of a round that has just completed."""
        match event:
            case RequestArrived():
                last = max(self.requests, default=-1)  # R1: ids grow, an old one is nobody's
                for request in event.requests:
                    if request.request_id > last:
                        self.requests[request.request_id] = request
            case RequestSeated():
                self.take_seated(event)
            case RoundCompleted() if self.flight and event.round_id == self.flight.round_id:
                return self.take_completed(event)
            case RoundFailed() if self.flight and event.round_id == self.flight.round_id:
                self.take_failed(self.flight)
            case EngineLost():
                self.flight = None
            case PolicyChanged():
                self.mixes = self.mixes or event.policy.switch == "mixed"
            case _:
                pass
        return {}

    def take_seated(self, event: RequestSeated) -> None:
        seat = self.seats.get(event.slot)
        if seat is None or seat.name != (event.request_id, event.choice):
            return
        if seat.length is not None:
            return
        found = min(event.cached_length, seat.request.prompt_length - 1)
        seat.length = 0
        if seat.name in self.saved:
            seat.to_restore = self.saved[seat.name]
        elif event.choice == 0 and event.restore:
            seat.to_restore = found or None
        elif event.choice == 0:
            seat.length = found

    def take_completed(self, event: RoundCompleted) -> dict[Name, int]:
        launch = self.flight
        assert launch is not None
        self.flight = None
        tokens: dict[Name, int] = {}
        if len(event.results) != len(launch.lanes):
            return tokens
        for lane, result in zip(launch.lanes, event.results, strict=True):
            seat = self.seats[lane.slot]
            assert seat.length is not None
            if isinstance(result, Produced) and keeps_contract(lane, result):
                tokens[seat.name] = result.tokens
                self.move(launch, lane, seat, result.tokens)
                if result.tokens:
                    self.spoke.add(seat.name)
            elif launch.kind == "restore":
                seat.length, seat.to_restore = 0, None
        return tokens

    def take_failed(self, launch: LaunchRound) -> None:
        """Every lane is as before the launch; a stored prefix that did not come is not there."""
        self.flight = None
        for lane in launch.lanes:
            seat = self.seats[lane.slot]
            if launch.kind == "restore" and seat.name not in self.saved:
                seat.length, seat.to_restore = 0, None

    def move(self, launch: LaunchRound, lane: Lane, seat: Seat, tokens: int) -> None:
        assert seat.length is not None
        match launch.kind:
            case "restore":
                self.saved.pop(seat.name, None)
                seat.length, seat.to_restore = lane.count, None
            case "fork":
                seat.length = lane.count
            case "save":  # who ended meanwhile was to come back: its copy must be dropped
                if seat.name in self.leaving_for_ram and seat.name in self.ended_choices:
                    self.saved[seat.name] = lane.count
            case "sample":
                pass
            case "shift":
                seat.length -= lane.count
            case "decode":
                seat.length += max(1, tokens)
            case "mixed" if seat.name in self.spoke:
                seat.length += max(1, tokens)
            case _:
                seat.length += lane.count

    # --- effects ----------------------------------------------------------------------------------

    def perform(self, effect: AnyEffect, completed: dict[Name, int]) -> None:
        assert not self.stopped or isinstance(effect, FinishRequest), "an effect after the stop"
        match effect:
            case LaunchRound():
                self.launch(effect)
            case DeliverTokens():
                for one in effect.deliveries:
                    self.deliver((one.request_id, one.choice), one.tokens, completed)
            case FinishChoice():
                name = (effect.request_id, effect.choice)
                assert name not in self.ended_choices, f"choice {name} ended twice"
                assert effect.request_id not in self.answered, f"choice {name} after its request"
                self.ended_choices.add(name)
            case FinishRequest():
                self.answer(effect.request_id)
            case SeatRequest():
                self.seat(effect)
            case ReleaseSlot():
                self.release(effect)
            case DropSaved():
                name = (effect.request_id, effect.choice)
                assert name in self.saved, f"{name} is dropped from host RAM, where it is not"
                del self.saved[name]
            case AbortRound():
                self.abort(effect.round_id)
            case Stop():
                unanswered = set(self.requests) - self.answered
                assert not unanswered, f"the loop stops with requests {unanswered} unanswered"
                self.stopped = True

    def abort(self, round_id: int) -> None:
        flight = self.flight
        assert flight is not None and flight.round_id == round_id, "an abort of no round"
        assert round_id not in self.aborted, f"round {round_id} is aborted twice"
        self.aborted.add(round_id)

    def seat(self, effect: SeatRequest) -> None:
        name = (effect.request_id, effect.choice)
        assert effect.slot not in self.seats, f"slot {effect.slot} is given away while occupied"
        assert effect.request_id not in self.answered, f"request {name} is seated after its end"
        assert name not in {seat.name for seat in self.seats.values()}, f"{name} sits twice"
        self.seats[effect.slot] = Seat(name, self.requests[effect.request_id])

    def release(self, effect: ReleaseSlot) -> None:
        before = self.versions.get(effect.slot, 0)
        assert effect.version > before, (
            f"slot {effect.slot}: version {effect.version} after {before}"
        )
        self.versions[effect.slot] = effect.version
        if effect.reason == "evicted":
            assert effect.slot not in self.seats, f"slot {effect.slot} is evicted while occupied"
            return
        carried = self.flight is not None and any(x.slot == effect.slot for x in self.flight.lanes)
        assert not carried, f"slot {effect.slot} is released with a lane in flight"
        seat = self.seats.pop(effect.slot)
        assert seat.length is not None, f"slot {effect.slot} is released before it was seated"
        assert effect.keep <= seat.length, f"slot {effect.slot} keeps more than it holds"
        if effect.reason == "saved":
            self.saved[seat.name] = seat.length
        else:
            assert seat.name in self.ending, f"{seat.name} lost its seat without an end"

    def answer(self, request_id: int) -> None:
        assert request_id in self.requests, f"request {request_id} was never made"
        assert request_id not in self.answered, f"request {request_id} answered twice"
        for seat in self.seats.values():
            if seat.name[0] == request_id:
                assert seat.name in self.ended_choices, f"{seat.name} outlives its request"
        self.answered.add(request_id)

    def deliver(self, name: Name, tokens: int, completed: dict[Name, int]) -> None:
        assert name not in self.ended_choices, f"tokens for {name}, which has ended"
        assert 0 < tokens <= completed.get(name, 0), f"{name} was given tokens nobody produced"
        self.delivered[name] = self.delivered.get(name, 0) + tokens
        limit = self.requests[name[0]].output_limit
        assert limit is None or self.delivered[name] <= limit, f"{name} got more than its limit"

    # --- rounds -----------------------------------------------------------------------------------

    def launch(self, launch: LaunchRound) -> None:
        assert self.flight is None, "a second round while one is in flight"
        assert launch.round_id > self.round_id_last, "a round id comes twice"
        assert launch.lanes, "a round without lanes"
        assert launch.kind in (*PREFILL_CLASS, *DECODE_CLASS) or self.mixes, "a mixed round"
        slots = [lane.slot for lane in launch.lanes]
        assert len(set(slots)) == len(slots), "two lanes of a round in one slot"
        for lane in launch.lanes:
            self.check_lane(launch, lane)
        if launch.kind in COMPUTE:
            rows = sum(lane.count for lane in launch.lanes)
            assert rows <= self.limits.batch_tokens, f"{rows} rows in a round"
            groups = {self.group_of(lane) for lane in launch.lanes}
            assert len(groups) == 1, f"groups {groups} share a round"
        self.check_pages(launch)
        self.flight, self.round_id_last = launch, launch.round_id
        names = [(lane.request_id, lane.choice) for lane in launch.lanes]
        self.leaving_for_ram = {one for one in names if one not in self.ending}

    def group_of(self, lane: Lane) -> tuple[int, str]:
        request = self.requests[lane.request_id]
        return request.adapter, request.kind

    def check_lane(self, launch: LaunchRound, lane: Lane) -> None:
        seat, name = self.seats.get(lane.slot), (lane.request_id, lane.choice)
        assert seat is not None and seat.name == name, f"a lane for {name}, who has no such seat"
        assert seat.length is not None, f"a lane for {name} before RequestSeated"
        saves = launch.kind == "save"
        assert saves or name not in self.ending, f"a lane for {name}, which has ended"
        prompt, spoke = seat.request.prompt_length, name in self.spoke
        if launch.kind != "restore":
            if seat.request.shared and name not in self.saved:
                seat.to_restore = None  # it follows, or followed, somebody with more than is stored
            assert seat.to_restore is None, f"{launch.kind} for {name} before its state is back"
        match launch.kind:
            case "restore":
                assert (lane.start, lane.count) == (0, seat.to_restore), f"restore of {name}"
            case "save":  # whoever has ended may have been cut to its length before a round
                whole = lane.count == seat.length or name in self.ending
                assert lane.start == 0 and whole, f"save of {name}"
                assert lane.count <= seat.length, f"{name} saves more than it holds"
            case "fork":
                source = self.seats[lane.source] if lane.source is not None else None
                assert source is not None and source.length is not None, "a fork of nothing"
                whole = source.length == lane.count or self.limits.forks_anywhere
                assert whole and lane.count <= source.length, f"{name} forks past its source"
                assert lane.start == 0 < lane.count <= prompt, f"{name} forks past its own prompt"
            case "shift":
                assert lane.start + lane.count <= seat.length, f"shift of {name}"
            case "sample":
                here = (lane.start, lane.count, lane.outputs)
                assert here == (seat.length, 0, 1), f"sample of {name}"
                assert seat.length == prompt and not spoke, f"first token of {name}"
            case _:
                self.check_rows(lane, seat, launch.kind)

    def check_rows(self, lane: Lane, seat: Seat, kind: str) -> None:
        prompt, end = seat.request.prompt_length, lane.start + lane.count
        assert lane.start == seat.length, f"{seat.name} holds {seat.length}, lane at {lane.start}"
        assert lane.count > 0, f"an empty lane for {seat.name}"
        assert end <= self.limits.context_length, f"{seat.name} passes the context at {end}"
        if kind == "decode" or (kind == "mixed" and seat.name in self.spoke):
            assert lane.count == lane.outputs, f"decode rows of {seat.name} without outputs"
            assert seat.name in self.spoke, f"{seat.name} decodes before its first token"
        else:
            assert end <= prompt, f"prompt rows of {seat.name} up to {end} of {prompt}"
            assert end == prompt or not self.limits.whole_prompts, f"{seat.name}'s prompt is cut"
            assert lane.outputs == 0 or (self.mixes and end == prompt)

    def check_pages(self, launch: LaunchRound) -> None:
        """What the seats hold once the round is done fits the pages, where none are shared."""
        if self.limits.shares_pages:
            return
        length, used = self.limits.page_length, 0
        ends = {lane.slot: lane.start + lane.count for lane in launch.lanes}
        for slot, seat in self.seats.items():
            used += -(-max(ends.get(slot, 0), seat.length or 0) // length)
        assert used <= self.limits.page_count, f"{used} pages of {self.limits.page_count} in use"


def keeps_contract(lane: Lane, result: Produced) -> bool:
    """R13: an answer outside the contract is as good as none."""
    if not lane.outputs:
        return result.tokens == 0
    return 0 <= result.tokens <= lane.outputs and (result.tokens > 0 or result.finish)
