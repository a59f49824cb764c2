"""Goal: /metrics has llama-server's figures under its names, and phaseloop's own beside them.

Method: the text is read by Prometheus's own parser; the figures of known runs are arithmetic.
"""

import pytest
from http_world import Hold, TextEngine, World, until, world
from prometheus_client.parser import text_string_to_metric_families
from scripted import DESCRIPTION

from phaseloop.core.policy import PRESETS
from phaseloop.core.state import initial
from phaseloop.core.vocabulary import Request
from phaseloop.engine.protocol import limits_of
from phaseloop.http.metrics import gauges, llamacpp, totals
from phaseloop.http.served import HttpOptions
from phaseloop.runtime.gateway import Submission
from phaseloop.runtime.watch import Counters

MEASURED = HttpOptions(metrics=True)
SECOND = 1_000_000_000

# Of llama-server, build 11434: the names in its order, with their types.
COUNTERS = (
    "prompt_tokens_total",
    "prompt_tokens_cached_total",
    "prompt_seconds_total",
    "tokens_predicted_total",
    "tokens_predicted_seconds_total",
    "n_decode_total",
    "n_tokens_max",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_drafts_total",
)
GAUGES = (
    "prompt_tokens_seconds",
    "predicted_tokens_seconds",
    "requests_processing",
    "requests_deferred",
    "n_busy_slots_per_decode",
)


async def scrape(here: World) -> dict[str, float]:
    """Every sample by its name, with its label's value after a blank if it has one."""
    answer = await here.client.get("/metrics")
    assert answer.status_code == 200
    return {
        " ".join([sample.name, *sample.labels.values()]): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


async def serve(here: World, *prompt_lengths: int) -> None:
    requests = [Submission(Request(0, length)) for length in prompt_lengths]
    with here.service.gateway.submit(requests) as call:
        for stream in call.streams:
            async for _ in stream:
                pass
    await until(lambda: here.service.state.phase == "idle")


# --- llama-server's block -------------------------------------------------------------------------


def test_names_and_types_are_those_of_llama_server():
    state = initial_state()
    lines = llamacpp(state, Counters(ends={}), Counters(ends={})).splitlines()
    expected = [("counter", name) for name in COUNTERS] + [("gauge", name) for name in GAUGES]
    for number, (kind, name) in enumerate(expected):
        about, typed, sample = lines[3 * number : 3 * number + 3]
        assert about.startswith(f"# HELP llamacpp:{name} ")
        assert typed == f"# TYPE llamacpp:{name} {kind}"
        assert sample == f"llamacpp:{name} 0"
    assert len(lines) == 3 * len(expected)


def initial_state():
    return initial(limits_of(DESCRIPTION), PRESETS["barrier-fair"])


def values(items) -> dict[str, float]:
    return {item.name: item.value for item in items}


def test_totals_are_the_counters():
    counters = Counters(
        prompt_tokens=300,
        prompt_tokens_cached=50,
        prefill_ns=2 * SECOND,
        generated_tokens=40,
        decode_ns=SECOND // 2,
        prefill_rounds=5,
        decode_rounds=20,
        mixed_rounds=3,
        decode_lanes=38,
        tokens_max=170,
        drafts=6,
        drafted_tokens=18,
        accepted_tokens=11,
        ends={},
    )
    assert tuple(values(totals(counters)).values()) == (
        300, 50, 2.0, 40, 0.5, 5 + 20 - 3, 170, 18, 11, 6
    )  # fmt: skip


def test_rates_are_those_since_the_last_scrape():
    before = Counters(
        prompt_tokens=100, prefill_ns=SECOND, decode_lanes=10, decode_ns=SECOND, ends={}
    )
    after = Counters(
        prompt_tokens=400,
        prefill_ns=3 * SECOND,
        decode_lanes=30,
        accepted_tokens=10,
        decode_rounds=15,
        decode_ns=SECOND + SECOND // 2,
        ends={},
    )
    state = initial_state()
    rates = values(gauges(state, after, before))
    assert rates["prompt_tokens_seconds"] == 300 / 2
    assert rates["predicted_tokens_seconds"] == (20 + 10) / 0.5, "a step yields accepted drafts too"
    assert rates["n_busy_slots_per_decode"] == 30 / 15
    idle = values(gauges(state, after, after))
    assert (idle["prompt_tokens_seconds"], idle["predicted_tokens_seconds"]) == (0, 0)


@pytest.mark.asyncio
async def test_the_figures_of_a_run():
    """Rounds: 44 + 20 rows, 56 rows; the sample; three decodes, the last of which ends both."""
    async with world(TextEngine(), MEASURED) as here:
        await serve(here, 100, 20)
        found = await scrape(here)
        again = await scrape(here)
    assert found["llamacpp:prompt_tokens_total"] == 120
    assert found["llamacpp:tokens_predicted_total"] == 6
    assert found["llamacpp:n_decode_total"] == 2 + 3
    assert found["llamacpp:n_tokens_max_total"] == 103, "the parser insists on the ending"
    prompt_s = found["llamacpp:prompt_seconds_total"]  # as long as this machine took
    decode_s = found["llamacpp:tokens_predicted_seconds_total"]
    assert found["llamacpp:prompt_tokens_seconds"] == pytest.approx(120 / prompt_s)
    assert found["llamacpp:predicted_tokens_seconds"] == pytest.approx(6 / decode_s)
    assert found["llamacpp:n_busy_slots_per_decode"] == 2
    assert again["llamacpp:prompt_tokens_seconds"] == 0, "a scrape begins a new window"
    assert again["llamacpp:prompt_tokens_total"] == 120


@pytest.mark.asyncio
async def test_the_format_is_stated_and_so_is_the_start():
    async with world(options=MEASURED) as here:
        answer = await here.client.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4"
    assert int(answer.headers["process-start-time-unix"]) == here.app.state.serving.started


@pytest.mark.asyncio
async def test_metrics_need_their_flag():
    async with world() as here:
        answer = await here.client.get("/metrics")
    assert answer.status_code == 501
    assert "--metrics" in answer.json()["error"]["message"]


# --- phaseloop's block ----------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_requests_that_run_and_requests_that_wait():
    """The long prompt needs pages for itself and the reserve of an answer: (100 + 512) / 256."""
    engine = TextEngine()
    async with world(engine, MEASURED) as here:
        hold = engine.on_run = Hold("prefill", 2)
        requests = [Submission(Request(0, length)) for length in (100, 20, 7)]
        with here.service.gateway.submit(requests) as call:
            await hold.reached.wait()
            found = await scrape(here)
            hold.let_go()
            for stream in call.streams:
                async for _ in stream:
                    pass
    assert found["llamacpp:requests_processing"] == 2
    assert found["llamacpp:requests_deferred"] == found["phaseloop:queue_length"] == 1
    assert found["phaseloop:phase prefill"] == 1
    assert found["phaseloop:phase decode"] == found["phaseloop:phase idle"] == 0
    assert (found["phaseloop:cohort"], found["phaseloop:sealed"]) == (1, 1)
    assert (found["phaseloop:slots prefilling"], found["phaseloop:slots ready"]) == (1, 1)
    assert found["phaseloop:slots empty"] == found["phaseloop:slots generating"] == 0
    assert found["phaseloop:kv_pages reserved"] == 3 + 3
    assert found["phaseloop:kv_pages free"] == 64 - 6
    assert found["phaseloop:kv_usage_ratio"] == 6 / 64
    assert found["phaseloop:kv_pages cached"] == 0
    assert found["phaseloop:saved_sequences"] == 0


@pytest.mark.asyncio
async def test_what_has_ended_is_counted_by_its_reason():
    async with world(TextEngine(), MEASURED) as here:
        await serve(here, 100, 20)
        await serve(here, 10)
        with here.service.gateway.submit([Submission(Request(0, 5000))]) as call:
            (stream,) = call.streams
            assert [item async for item in stream] == []
        found = await scrape(here)
    assert found["phaseloop:requests_total stop"] == 3
    assert found["phaseloop:requests_total exceeds_context"] == 1
    assert found["phaseloop:rounds_total prefill"] == 3
    assert found["phaseloop:rounds_total decode"] == 6
    assert found["phaseloop:rounds_total mixed"] == found["phaseloop:mixed_rounds_total"] == 0
    assert found["phaseloop:phase_changes_total"] == 6, "prefill, decode, idle, twice"
    assert found["phaseloop:kv_pages cached"] == 2, "each of the two slots keeps a page"


@pytest.mark.asyncio
async def test_mixed_rounds_show_under_the_policy_that_has_them():
    engine = TextEngine(length=5)
    async with world(engine, MEASURED, policy="mixed") as here:
        hold = engine.on_run = Hold("decode")
        with here.service.gateway.submit([Submission(Request(0, 8))]) as first:
            await hold.reached.wait()
            with here.service.gateway.submit([Submission(Request(0, 8))]) as second:
                await until(lambda: here.service.state.slots.count(None) == 0)
                hold.let_go()
                for stream in (*first.streams, *second.streams):
                    async for _ in stream:
                        pass
        found = await scrape(here)
    assert found["phaseloop:mixed_rounds_total"] == found["phaseloop:rounds_total mixed"] == 1
    assert found["llamacpp:tokens_predicted_total"] == 10
