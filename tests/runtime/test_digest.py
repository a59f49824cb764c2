"""Goal: equal states have equal digests, different states differ in the part that differs.

Method: a run with a busy queue, whose incremental queue digest is compared with a full computation
after every step; then every field of State is changed on its own.
"""

from pathlib import Path

import msgspec
import pytest
from immutables import Map
from msgspec.structs import replace
from scripted import MS, BareWorld, ScriptedEngine, arrival, random_events

from phaseloop.core.policy import PRESETS
from phaseloop.core.state import Cache, Limits, Pending, Saved, Sequence, State, initial
from phaseloop.core.vocabulary import AnyEvent, Request
from phaseloop.runtime import digest
from phaseloop.runtime.digest import Fingerprint, Subtrees, core_digest, queue_sum
from phaseloop.runtime.loop import run_virtual

# Large numbers: msgspec takes small ones for defaults wherever they come from.
STATE = initial(Limits(2, 64, 4096, 640), PRESETS["quantum"])


def subtrees(state: State) -> Subtrees:
    return Fingerprint(b"", state).subtrees(state)


@pytest.mark.parametrize("policy", ["barrier-fair", "mixed", "quantum"])
def test_the_queue_digest_kept_is_the_one_computed(policy):
    world = BareWorld(ScriptedEngine(duration_ns=20 * MS), PRESETS[policy])
    for event in random_events(7, 120):
        world.clock.post(event)
    fingerprint = Fingerprint(b"", world.stepper.state)
    queued: list[int] = []

    def step(event: AnyEvent) -> None:
        before, first_effect = world.stepper.state, len(world.effects)
        take(event)
        after, effects = world.stepper.state, tuple(world.effects[first_effect:])
        fingerprint.step(b"", event, before, after, effects)
        assert fingerprint.queue_sum == queue_sum(after.queue), event
        queued.append(len(after.queue))

    take, world.stepper.step = world.stepper.step, step
    run_virtual(world.stepper, world.clock)
    assert max(queued) > 30
    assert queued[-1] == 0


def test_a_refused_call_leaves_the_queue_digest_alone():
    world = BareWorld(ScriptedEngine())
    before = world.stepper.state
    world.stepper.step(arrival(0, 0, prompt_length=100_000))
    assert world.stepper.state.queue == before.queue
    assert queue_sum(world.stepper.state.queue) == 0


def test_equal_states_have_equal_digests_wherever_they_come_from():
    read = msgspec.json.decode(msgspec.json.encode(STATE.limits), type=Limits)
    spelled = msgspec.structs.asdict(STATE.limits)
    stated = msgspec.json.decode(msgspec.json.encode(spelled), type=Limits)
    for limits in (read, stated):
        assert subtrees(replace(STATE, limits=limits)) == subtrees(STATE)


SEQUENCE = Sequence(Request(5, 10), 0, 3, 99, 99, (0, "completion"), "swapping", 10, 0, 2, None, 2)
OTHER_VALUES = {
    "limits": Limits(2, 64, 4096, 641),
    "policy": PRESETS["mixed"],
    "slots": (SEQUENCE, None),
    "saved": (Saved(SEQUENCE, 5, "memory"),),
    "caches": (Cache(version=7),),
    "pages_free": 3,
    "queue": Map({5: Pending(Request(5, 10), 99)}),
    "order": (((0, 5),),),
    "timers": (((10, 5),),),
    "phase": "decode",
    "policy_pending": PRESETS["mixed"],
}
PARTS = {"queue": "queue", "order": "queue", "timers": "queue", "slots": "slots"} | dict.fromkeys(
    ("caches", "pages_free", "saved"), "kv"
)


@pytest.mark.parametrize("name", State.__struct_fields__)
def test_every_field_shows_in_its_part(name):
    value = OTHER_VALUES.get(name, ())
    if value == ():
        value = getattr(STATE, name)
        value = (value or 0) + 1 if isinstance(value, int | None) else None
    changed, original = subtrees(replace(STATE, **{name: value})), subtrees(STATE)
    differing = [
        part
        for part in Subtrees.__struct_fields__
        if getattr(changed, part) != getattr(original, part)
    ]
    assert differing == [PARTS.get(name, "phase")]


def test_sums_do_not_depend_on_the_order_of_entries():
    entries = [(n, Pending(Request(n, 10 + n), n)) for n in range(50)]
    assert queue_sum(Map(entries)) == queue_sum(Map(reversed(entries)))
    assert queue_sum(Map(entries)) != queue_sum(Map(entries[1:]))


def test_the_source_digest_follows_every_byte_and_name(tmp_path, monkeypatch):
    monkeypatch.setattr(digest, "files", lambda package: tmp_path)
    seen = set()
    for name, content in (("a.py", "x = 1"), ("b.py", ""), ("a.py", "x = 2"), ("c.txt", "no")):
        Path(tmp_path, name).write_text(content)
        seen.add(core_digest())
    assert len(seen) == 3


def test_the_source_digest_is_that_of_this_core():
    assert core_digest() == core_digest()
    assert len(core_digest()) == 16
