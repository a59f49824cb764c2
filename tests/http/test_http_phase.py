"""Goal: /phase and /slots show who sits where and why it waits; PUT /phase changes the policy.

Method: an engine that is held in a known round, so that every role and reason is arithmetic:
64 rows a round, two slots.
"""

from contextlib import asynccontextmanager

import pytest
from http_world import Hold, TextEngine, World, until, world
from msgspec.structs import replace

from phaseloop.core.explain import REASONS
from phaseloop.core.policy import PRESETS
from phaseloop.core.vocabulary import Request
from phaseloop.engine.settings import Sampling
from phaseloop.http.served import HttpOptions
from phaseloop.runtime.gateway import Submission

pytestmark = pytest.mark.asyncio

MS = 1_000_000
CONTROLLED = HttpOptions(phase_control=True)
LONG = Submission(Request(0, 100, output_limit=9), tuple(range(100)), seed=77)
SHORT = Submission(Request(0, 20, choices=1), tuple(range(20)), sampling=Sampling(top_k=5))
LATE = Submission(Request(0, 10))


@asynccontextmanager
async def held(kind, nth=1, *, submissions=(LONG, SHORT), options=HttpOptions(), **fields):  # noqa: B008
    """A world whose engine is in its nth round of a kind, and goes on when the test is done."""
    engine = TextEngine()
    async with world(engine, options, **fields) as here:
        hold = engine.on_run = Hold(kind, nth)
        with here.service.gateway.submit(list(submissions)) as call:
            await hold.reached.wait()
            try:
                yield here
            finally:
                hold.let_go()
            for stream in call.streams:
                async for _ in stream:
                    pass


async def phase_of(here: World) -> dict:
    answer = await here.client.get("/phase")
    assert answer.status_code == 200
    return answer.json()


def without_times(value):
    """The moments are the machine's; that they are not negative is all that can be said."""
    if isinstance(value, list):
        return [without_times(one) for one in value]
    if not isinstance(value, dict):
        return value
    since_ms = value.get("since_ms")
    assert since_ms is None or since_ms >= 0
    return {name: without_times(one) for name, one in value.items() if name != "since_ms"}


def row(slot: int, task: int, role: str, reason: str, waits_for=()) -> dict:
    return {
        "id": slot,
        "id_task": task,
        "role": role,
        "reason": reason,
        "why": REASONS[reason],
        "waits_for": list(waits_for),
    }


def empty(slot: int) -> dict:
    return {"id": slot, "role": None, "reason": None, "why": None, "waits_for": []}


# --- GET /phase -----------------------------------------------------------------------------------


async def test_an_idle_engine():
    async with world() as here:
        shown = await phase_of(here)
    assert without_times(shown) == {
        "policy": "barrier-fair",
        "pending": None,
        "phase": "idle",
        "cohort": 0,
        "sealed": False,
        "slots": [empty(0), empty(1)],
        "queue_length": 0,
        "queue": [],
        "saved": [],
    }


async def test_two_prompts_share_a_round_and_a_third_finds_no_slot():
    async with held("prefill", submissions=[LONG, SHORT, LATE]) as here:
        shown = without_times(await phase_of(here))
    assert (shown["phase"], shown["cohort"], shown["sealed"]) == ("prefill", 1, False)
    assert shown["slots"] == [
        row(0, 0, "prefilling", "in_round"),
        row(1, 1, "prefilling", "in_round"),
    ]
    assert shown["queue_length"] == 1
    waiting = row(0, 2, "", "no_slot", waits_for=[0, 1])
    assert shown["queue"] == [
        {name: waiting[name] for name in ("id_task", "reason", "why", "waits_for")}
    ]


async def test_who_is_ready_waits_at_the_barrier_for_who_is_not():
    """20 of 20 and 44 of 100 rows went into the first round; the second carries the other 56."""
    async with held("prefill", 2) as here:
        shown = without_times(await phase_of(here))
    assert shown["sealed"] is True
    assert shown["slots"] == [
        row(0, 0, "prefilling", "in_round"),
        row(1, 1, "ready", "barrier", waits_for=[0]),
    ]


async def test_those_who_arrive_while_a_cohort_generates_wait_for_its_end():
    async with held("decode") as here:
        with here.service.gateway.submit([LATE]):
            await until(lambda: len(here.service.state.queue) == 1)
            shown = without_times(await phase_of(here))
    assert shown["phase"] == "decode"
    assert [slot["role"] for slot in shown["slots"]] == ["generating", "generating"]
    (waiting,) = shown["queue"]
    assert (waiting["id_task"], waiting["reason"]) == (2, "cohort_generates")
    assert waiting["waits_for"] == [0, 1]


async def test_a_long_queue_is_shown_from_its_head():
    async with held("prefill", submissions=[LONG, SHORT] + [LATE] * 30) as here:
        shown = await phase_of(here)
    assert shown["queue_length"] == 30
    assert [one["id_task"] for one in shown["queue"]] == list(range(2, 18))


# --- GET /slots -----------------------------------------------------------------------------------


async def test_slots_that_nobody_has_used():
    async with world() as here:
        slots = (await here.client.get("/slots")).json()
    assert [slot["id"] for slot in slots] == [0, 1]
    assert without_times(slots[0]) == {
        "id": 0,
        "n_ctx": 4096,
        "speculative": False,
        "is_processing": False,
        "n_prompt_tokens_cache": 0,
        "phase": "idle",
        "cohort": 0,
        "role": None,
        "reason": None,
        "why": None,
        "waits_for": [],
    }


async def test_slots_tell_how_far_each_prompt_is():
    async with held("prefill", 2) as here:
        long, short = (await here.client.get("/slots")).json()
    assert (long["id_task"], long["is_processing"], long["role"]) == (0, True, "prefilling")
    assert (long["n_prompt_tokens"], long["n_prompt_tokens_processed"]) == (100, 44)
    assert (short["n_prompt_tokens"], short["n_prompt_tokens_processed"]) == (20, 20)
    assert (short["role"], short["reason"]) == ("ready", "barrier")
    assert long["next_token"] == [{"has_next_token": True, "n_remain": 9, "n_decoded": 0}]
    assert long["params"]["seed"] == 77
    assert (long["params"]["n_predict"], short["params"]["n_predict"]) == (9, -1)
    assert (long["params"]["top_k"], short["params"]["top_k"]) == (40, 5)
    assert short["phase"] == "prefill"


async def test_slots_tell_how_far_each_answer_is():
    async with held("decode", 2) as here:
        slots = (await here.client.get("/slots")).json()
    assert [slot["role"] for slot in slots] == ["generating", "generating"]
    assert [slot["next_token"][0]["n_decoded"] for slot in slots] == [2, 2]
    assert slots[0]["next_token"][0]["n_remain"] == 7
    limit = 4096 - 20  # what the context leaves for it
    assert slots[1]["next_token"][0]["n_remain"] == limit - 2


async def test_an_empty_slot_tells_what_it_keeps():
    async with world() as here:
        with here.service.gateway.submit([SHORT]) as call:
            (stream,) = call.streams
            async for _ in stream:
                pass
        await until(lambda: here.service.state.slots == (None, None))
        slots = (await here.client.get("/slots")).json()
    kept = 20 + 3  # the prompt, and all of the answer that went through the engine
    assert sorted(slot["n_prompt_tokens_cache"] for slot in slots) == [0, kept]


@pytest.mark.parametrize(("query", "status"), [("", 200), ("?fail_on_no_slot=1", 503)])
async def test_a_health_check_may_insist_on_a_free_slot(query, status):
    async with held("prefill") as here:
        answer = await here.client.get(f"/slots{query}")
    assert answer.status_code == status
    if status == 503:
        error = {"code": 503, "message": "no slot available", "type": "unavailable_error"}
        assert answer.json() == {"error": error}


async def test_a_free_slot_is_enough():
    async with held("prefill", submissions=[SHORT]) as here:
        assert (await here.client.get("/slots?fail_on_no_slot=1")).status_code == 200


async def test_slots_can_be_hidden():
    async with world(options=HttpOptions(slots=False)) as here:
        answer = await here.client.get("/slots")
    assert answer.status_code == 501
    assert "--slots" in answer.json()["error"]["message"]


# --- PUT /phase -----------------------------------------------------------------------------------


async def test_a_policy_waits_for_the_round_in_flight():
    async with held("prefill", options=CONTROLLED) as here:
        body = {"policy": "quantum", "tg_quantum_ms": 100, "linger_ms": None}
        answer = await here.client.put("/phase", json=body)
        assert answer.status_code == 200
        assert (answer.json()["policy"], answer.json()["pending"]) == ("barrier-fair", "quantum")
        await until(lambda: here.service.state.policy_pending is not None)
        shown = await phase_of(here)
        assert (shown["policy"], shown["pending"]) == ("barrier-fair", "quantum")
        service = here.service
    assert service.state.policy == replace(PRESETS["quantum"], decode_quantum_ns=100 * MS)


@pytest.mark.parametrize(
    ("body", "policy"),
    [
        ({"policy": "mixed"}, PRESETS["mixed"]),
        (
            {"policy": "quantum", "pp_quantum_ms": 1, "seat_quantum_ms": 2},
            replace(PRESETS["quantum"], prefill_quantum_ns=MS, seat_quantum_ns=2 * MS),
        ),
        ({"linger_ms": 5}, replace(PRESETS["barrier-fair"], linger_ns=5 * MS)),
        (
            {"policy": "barrier-serial", "serial_order": "shortest"},
            replace(PRESETS["barrier-serial"], serial_order="shortest"),
        ),
        ({"policy": None}, PRESETS["barrier-fair"]),
    ],
)
async def test_a_policy_is_a_preset_with_what_is_stated(body, policy):
    async with world(options=CONTROLLED) as here:
        answer = await here.client.put("/phase", json=body)
        assert answer.status_code == 200
        await until(lambda: here.service.state.policy == policy)


async def test_what_was_set_before_stays_with_a_policy():
    async with world(options=CONTROLLED) as here:
        for body in ({"policy": "quantum", "tg_quantum_ms": 7}, {"pp_quantum_ms": 9}):
            await here.client.put("/phase", json=body)
            await until(lambda: here.service.state.policy.name == "quantum")
        policy = replace(PRESETS["quantum"], decode_quantum_ns=7 * MS, prefill_quantum_ns=9 * MS)
        await until(lambda: here.service.state.policy == policy)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"policy": "barier-fair"}, "policy: 'barier-fair' is none; did you mean barrier-fair?"),
        ({"policy": "zzz"}, "policy: 'zzz' is none; There are mixed, no-cont-batching"),
        ({"policy": 5}, "policy: must be a string, not 5"),
        ({"policy": "mixed", "tg_quantum_ms": 5}, "tg_quantum_ms: mixed has no such setting"),
        ({"policy": "quantum", "linger_ms": 5}, "linger_ms: quantum has no such setting"),
        ({"policy": "quantum", "tg_quantum_ms": -1}, "tg_quantum_ms: must be between 0 and"),
        ({"policy": "quantum", "tg_quantum_ms": "5"}, "tg_quantum_ms: must be an integer"),
        ({"policy": "mixed", "serial_order": "shortest"}, "serial_order: mixed has no such"),
        ({"serial_order": "longest"}, "serial_order: must be fifo or shortest, not 'longest'"),
    ],
)
async def test_what_is_no_policy_changes_nothing(body, message):
    async with world(options=CONTROLLED) as here:
        answer = await here.client.put("/phase", json=body)
        assert here.service.state.policy == PRESETS["barrier-fair"]
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(message)


async def test_policies_are_changed_only_where_the_operator_allows():
    async with world() as here:
        answer = await here.client.put("/phase", json={"policy": "mixed"})
        assert (await phase_of(here))["pending"] is None
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (403, "permission_error")
    assert "--phase-control" in error["message"]
