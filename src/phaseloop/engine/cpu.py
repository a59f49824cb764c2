"""The model engine: rounds over a loaded model, one slot per KV region.

A round is at most one call of the backend; its lanes share the pass.  Prefill keeps the logits of a
prompt's last row with the sequence, `sample` draws from them, and decode computes the pending token
and draws its successor; so first tokens are drawn when the reducer says, not when they could be.
"""

import logging
import threading
from collections.abc import Sequence

from phaseloop.core.vocabulary import (
    Lane,
    LaunchRound,
    RequestId,
    SeatRequest,
    SlotIndex,
)
from phaseloop.ops.delta_states import NO_SHIFT
from phaseloop.ops.interface import Aborted, Backend, BackendError, Snapshot, Span

from .cpu_draws import NOTHING, Check, Drawn, Draws, refused
from .cpu_hidden import check_hidden, forward, shown
from .cpu_slot import Saved, Slot, Source
from .draft import Computed, Drafter, Followed, NoDrafts
from .protocol import Content, Description, Outcome, RoundError, Seated
from .reuse import STEP, Positions, marks_of, reachable
from .sampler import Sampler
from .settings import Adapters
from .slot_file import OF_A_FILE, Origin
from .snapshots import MOVE_MIN, Ids, Kept, Snapshots, common_length, is_worth_keeping, packed
from .speculate import USUAL, Speculator, Terms

log = logging.getLogger(__name__)


PAGE_LENGTH = 256
NO_LOGITS = "no logits to sample"
STATES_KEPT = 4  # recurrent states that a snapshot takes along: the last ones


class ModelEngine:
    """Implements engine.protocol.Engine.

    `reuse_generated`: whether a later prompt may keep what was computed as generated tokens.  Where
    those have other bits than a prompt's, reuse ends before them, or a cached answer could differ
    from a cold one.  `snapshots`: where state goes that a slot loses and a later prompt may want;
    without it, nowhere.  `unstable`: as in Description.  `state_step`: a prompt's recurrent states
    are kept at multiples of it.  `drafter` and `terms`: who guesses, and what that costs.
    """

    def __init__(
        self,
        backend: Backend,
        sampler: Sampler,
        *,
        slot_count: int,
        context_length: int,
        batch_tokens: int,
        end_tokens: frozenset[int],
        reuse_generated: bool,
        model_digest: str | None = None,
        page_count: int | None = None,
        snapshots: Snapshots | None = None,
        unstable: tuple[str, ...] = (),
        state_step: int = STEP,
        drafter: Drafter | None = None,
        terms: Terms = USUAL,
        adapter_digests: tuple[str, ...] = (),
    ) -> None:
        self.snapshots = Snapshots(0) if snapshots is None else snapshots
        self._backend = backend
        self._drafter = NoDrafts() if drafter is None else drafter
        check_hidden(backend, self._drafter)
        self._speculator = Speculator(self._drafter, terms)
        self._draws = Draws(sampler, end_tokens)
        self._slots = [Slot(region, backend, self._drafter) for region in range(slot_count)]
        self._saved: dict[tuple[RequestId, int], Saved] = {}
        self._reuse_generated = reuse_generated
        self._state_step = state_step
        self._is_recurrent = backend.state_bytes > 0
        self._running: int | None = None
        self._abort_lock = threading.Lock()  # an abort must not reach the round after its own
        pages = slot_count * -(-context_length // PAGE_LENGTH)
        self._description = Description(
            name=backend.name + ("-reuse" if reuse_generated else ""),
            slot_count=slot_count,
            batch_tokens=batch_tokens,
            context_length=context_length,
            page_count=pages if page_count is None else page_count,
            page_length=PAGE_LENGTH,
            draft_tokens=self._drafter.most,
            drafters=self._drafter.name,
            can_save=True,
            forks_anywhere=not self._is_recurrent,
            can_shift=not self._is_recurrent,
            cache_ram_bytes=self.snapshots.budget_bytes,
            reuses_generated=reuse_generated,
            unstable=unstable,
            model=model_digest,
            adapters=adapter_digests,
        )

    def describe(self) -> Description:
        return self._description

    def seat(self, seat: SeatRequest, content: Content) -> Seated:
        """Finds the longest prefix, wherever it is: in the slot, in another, or in host RAM."""
        slot = self._slots[seat.slot]
        here, source = 0, None
        if content.reuse and seat.reason not in ("sibling", "resume"):
            # The last row is always computed: its logits are wanted.
            prompt = packed(content.tokens)[:-1]
            here = slot.usable(prompt, content.adapters)
            source = self._source_elsewhere(prompt, content.adapters, here, content.brought)
        if not content.forget:
            self._keep_what_is_lost(slot, here)
        keep = here if source is None else 0
        slot.seat(seat.request_id, seat.choice, content, keep, source)
        if self._is_recurrent and content.reuse:
            slot.marks = marks_of(len(content.tokens), content.stop_points, self._state_step)
        return Seated(keep) if source is None else Seated(len(source.ids), restore=True)

    def run(self, launch: LaunchRound) -> Outcome:
        before = [(self._slots[lane.slot], self._slots[lane.slot].length) for lane in launch.lanes]
        with self._abort_lock:
            self._running = launch.round_id
        try:
            drawn = self._run(launch)
        except Exception as error:
            for slot, length in before:
                slot.truncate(length)
            if isinstance(error, Aborted | BackendError):
                raise RoundError(str(error) or "aborted") from error
            raise
        finally:
            with self._abort_lock:
                self._running = None
                self._backend.resume()
                self._drafter.resume()
        return Outcome(
            tuple(one.result for one in drawn),
            tuple(one.ids for one in drawn),
            tuple(one.likelihoods for one in drawn),
            tuple(one.drafted for one in drawn) if self._drafter.most else (),
        )

    def abort(self, round_id: int) -> None:
        with self._abort_lock:
            if self._running == round_id:
                self._backend.abort()
                self._drafter.abort()

    def release(self, slot: SlotIndex, keep: int, version: int) -> None:
        held = self._slots[slot]
        if held.request_id is None:  # an idle cache is evicted
            self._keep_what_is_lost(held, keep)
        held.clear(keep)

    def drop(self, request_id: RequestId, choice: int) -> None:
        self._saved.pop((request_id, choice), None)

    def positions(self, slot: SlotIndex) -> Positions:
        """At which lengths what a slot holds can be taken up.  From any thread."""
        return self._backend.positions(slot)

    @property
    def origin(self) -> Origin:
        """What a saved state must come from to be good here."""
        return Origin(
            self._description.model or "",
            self._description.name,
            self._backend.position_bytes,
            self._backend.state_bytes,
            self._description.adapters,
        )

    # --- prefixes ---------------------------------------------------------------------------------

    def _source_elsewhere(
        self, prompt: Ids, adapters: Adapters, here: int, brought: Kept | None = None
    ) -> Source | None:
        """Who holds so much more of a prompt than its slot does that it is worth a round."""
        holder: Kept | Slot | None = None
        length = here + MOVE_MIN - 1
        for other in self._slots:
            usable = other.usable(prompt, adapters)
            if usable > length:
                holder, length = other, usable
        found = self.snapshots.find(prompt, adapters)
        if found is not None and found.length > length:
            self.snapshots.touch(found.kept)
            holder, length = found.kept, found.length
        if brought is not None and brought.adapters == adapters:
            usable = reachable(common_length(brought.ids, prompt), brought.cells.positions)
            if usable > length:
                holder, length = brought, usable
        return None if holder is None else Source(prompt[:length], adapters, holder)

    def _keep_what_is_lost(self, slot: Slot, keep: int) -> None:
        """Copy an idle slot's state before it is cut to `keep`, if that is worth it."""
        ids = slot.kept
        if not is_worth_keeping(len(ids) - keep, len(ids)):
            return
        others = (other for other in self._slots if other is not slot)
        if any(
            other.adapters == slot.adapters and common_length(other.kept, ids) == len(ids)
            for other in others
        ):
            return
        self._keep(slot, ids)

    def _keep(self, slot: Slot, ids: Ids) -> None:
        count, positions = len(ids), self._backend.positions(slot.region)
        if not reachable(count, positions):
            return  # without a state nobody could go on from it
        states = sum(position <= count for position in positions or ())
        per_token = self._backend.position_bytes + self._drafter.position_bytes
        state_bytes = count * per_token + min(states, STATES_KEPT) * self._backend.state_bytes

        def save() -> Snapshot:
            return self._backend.save(slot.region, count).with_last_states(STATES_KEPT)

        def follow() -> Followed | None:
            return self._drafter.save(slot.region, count)

        try:
            self.snapshots.put(ids, state_bytes, save, follow, slot.adapters)
        except MemoryError:
            log.warning("no memory for a snapshot of %d tokens; lower --cache-ram", count)

    # --- rounds -----------------------------------------------------------------------------------

    def _run(self, launch: LaunchRound) -> list[Drawn]:
        match launch.kind:
            case "prefill" | "decode" | "mixed":
                return self._compute(launch.lanes)
            case "sample":
                return self._sample(launch.lanes)
            case "fork" | "save" | "restore" | "shift":
                if launch.reason == "save_idle":
                    return [self._save_idle(lane) for lane in launch.lanes]
                return [self._move(launch.kind, lane) for lane in launch.lanes]
            case "encode":
                return [refused("this model gives no embeddings")] * len(launch.lanes)

    def _compute(self, lanes: Sequence[Lane]) -> list[Drawn]:
        """Prompt chunks, pending tokens, drafts: one pass, then draws where tokens are wanted."""
        problems = [self._problem(lane) for lane in lanes]
        drawn = [NOTHING if problem is None else refused(problem) for problem in problems]
        runnable = [index for index, problem in enumerate(problems) if problem is None]
        if not runnable:
            return drawn
        going = [lanes[index] for index in runnable]
        slots = [self._slots[lane.slot] for lane in going]
        starts = [slot.length for slot in slots]
        drafts = self._speculator.propose(going, slots)
        spans = [self._span(*one) for one in zip(going, slots, drafts, strict=True)]
        logits, hidden = forward(self._backend, spans, self._drafter)
        checks: dict[int, Check] = {}
        row = 0
        for index, slot, span, guessed in zip(runnable, slots, spans, drafts, strict=True):
            is_cold = self._reuse_generated or not span.generated
            end = span.start + len(span.tokens) - len(guessed)
            slot.append(span.tokens[slot.length - span.start : end - span.start], cold=is_cold)
            rows, row = logits[row : row + span.outputs], row + span.outputs
            if span.outputs:
                slot.logits = rows[0]
            if slot.content.take is not None and slot.length == len(slot.prompt):
                slot.content.take(self._state_of(slot))
            if lanes[index].outputs:
                checks[index] = Check(lanes[index], slot, guessed, rows, is_cold, span.start)
        for index, one in zip(checks, self._verify(list(checks.values())), strict=True):
            drawn[index] = one
        self._speculator.follow(
            [
                Computed(slot.region, slot.tokens, start, span.generated, rows)
                for slot, span, start, rows in zip(
                    slots, spans, starts, shown(hidden, spans, starts, slots), strict=True
                )
            ]
        )
        return drawn

    def _verify(self, checks: Sequence[Check]) -> list[Drawn]:
        lengths = [check.slot.length for check in checks]
        drawn = self._draws.verify(checks)
        for check, length in zip(checks, lengths, strict=True):
            accepted = check.slot.length - length
            self._speculator.learn(check, accepted)
            if accepted < len(check.drafts):
                check.slot.reject(check.start)
        return drawn

    def _state_of(self, slot: Slot) -> Kept:
        """A copy of a prompt's state, as a file takes it."""
        cells = self._backend.save(slot.region, slot.length).with_last_states(STATES_KEPT)
        return Kept(OF_A_FILE, packed(slot.tokens), cells, adapters=slot.adapters)

    def _span(self, lane: Lane, slot: Slot, drafts: tuple[int, ...]) -> Span:
        end = lane.start + lane.count
        if slot.pending is not None:
            tokens = (*slot.tokens[slot.held :], slot.pending, *drafts)
            return Span(
                slot.region, slot.held, tokens, 1 + len(drafts), True, adapters=slot.adapters
            )
        is_last = end == len(slot.prompt)
        tokens = slot.prompt[lane.start : end]
        marks = tuple(mark for mark in slot.marks if lane.start < mark <= end)
        return Span(
            slot.region, lane.start, tokens, int(is_last), False, marks, adapters=slot.adapters
        )

    def _problem(self, lane: Lane) -> str | None:
        """Why a lane cannot be computed; never so while reducer and engine agree."""
        slot = self._slots[lane.slot]
        if lane.start != slot.length:
            return f"slot {lane.slot} holds {slot.length} tokens, the round begins at {lane.start}"
        if slot.pending is not None:
            return None
        left = len(slot.prompt) - lane.start - lane.count
        if left < 0 or (left and lane.outputs):
            return f"slot {lane.slot}: the prompt ends at {len(slot.prompt)}"
        return None

    def _sample(self, lanes: Sequence[Lane]) -> list[Drawn]:
        """First tokens.  The logits stay: children of the sequence draw from the same ones."""
        slots = [self._slots[lane.slot] for lane in lanes]
        drawn = [NOTHING if slot.logits is not None else refused(NO_LOGITS) for slot in slots]
        ready = [index for index, one in enumerate(drawn) if one is NOTHING]
        first = self._draws.draw([lanes[i] for i in ready], [slots[i] for i in ready])
        for index, one in zip(ready, first, strict=True):
            drawn[index] = one
        return drawn

    def _move(self, kind: str, lane: Lane) -> Drawn:
        slot, key = self._slots[lane.slot], (lane.request_id, lane.choice)
        if kind == "fork":
            assert lane.source is not None, "a fork has a source"
            parent = self._slots[lane.source]
            if lane.count > parent.length:
                return refused(f"slot {lane.source} holds {parent.length} of {lane.count} tokens")
            if parent.adapters != slot.adapters:
                return refused(f"slot {lane.source} was computed with other adapters")
            if not parent.can_reach(lane.count):
                return refused(f"slot {lane.source} has no state after {lane.count} tokens")
            slot.fork(parent, lane.count)
        elif kind == "save":
            self._saved[key] = slot.save()
        elif kind == "restore":
            return self._restore(slot, key, lane.count)
        elif self._is_recurrent:
            return refused(NO_SHIFT)
        else:
            slot.shift(lane.start, lane.count)
        return NOTHING

    def _save_idle(self, lane: Lane) -> Drawn:
        slot = self._slots[lane.slot]
        self._keep(slot, packed(slot.tokens[: min(slot.cold, lane.count)]))
        return NOTHING

    def _restore(self, slot: Slot, key: tuple[RequestId, int], count: int) -> Drawn:
        """A sequence that was saved, whole, or a prefix that its seat found elsewhere."""
        saved = self._saved.pop(key, None)
        source, slot.source = slot.source, None
        if saved is not None:
            slot.restore(saved)
            return NOTHING
        if source is None:
            return refused("nothing was saved of this sequence")
        if source.length() < count:  # its slot was taken meanwhile, which may have left a snapshot
            source = self._source_elsewhere(source.ids, source.adapters, 0)
        if source is None or len(source.ids) < count:
            return refused("its prefix has left the slot where it was found")
        slot.bring(source, count)
        return NOTHING
