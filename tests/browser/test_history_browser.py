"""Goal: the page's memory of the past is bounded, and right from near as from afar.

Method: its history module in a browser, fed with stretches whose shares of time are arithmetic.
"""

import pytest

pytest.importorskip("playwright", reason="no playwright: pip install 'phaseloop[dev]'")

HEAD = {"slot_count": 2, "page_count": 8, "looks": {}, "reasons": {}, "started": 1}
SECOND = 1_000_000_000
PRELUDE = """async ({head, batches, ask}) => {
  const { History, Series } = await import("/page/history.js");
  const { LOOKS } = await import("/page/looks.js");
  const history = new History(head, batches[0].now_ns);
  for (const batch of batches) history.add(batch);
  const shares = (level, slot, from, to) => {
    const sums = new Float64Array(LOOKS.length);
    const count = history.levels[level].sum(slot, from, to, sums);
    return [count, Object.fromEntries(LOOKS.map((look, i) => [look, sums[i]]).filter((e) => e[1]))];
  };
  return (%s);
}"""


@pytest.fixture
def ask(server, open_page):
    page = open_page(server)

    def asked(batches: list[dict], expression: str) -> object:
        return page.evaluate(PRELUDE % expression, {"head": HEAD, "batches": batches})

    return asked


def stretch(at_s: float, slot: int, look: str, request: int | None = None, reason=None) -> list:
    return ["slot", round(at_s * SECOND), slot, look, None, reason, request, 0, []]


def batch(now_s: float, *records: list, **fields) -> dict:
    return {"now_ns": round(now_s * SECOND), "records": list(records), **fields}


def test_shares_of_buckets(ask):
    """A quarter of the first second in decode; buckets of the narrowest level are 0.25 s wide."""
    batches = [
        batch(0, stretch(0, 0, "idle"), stretch(0, 1, "idle")),
        batch(1, stretch(0.125, 0, "decode", 7), stretch(0.375, 0, "idle")),
        batch(4),
    ]
    assert ask(batches, "shares(0, 0, 0, 2)") == [2, {"decode": 128 + 128, "idle": 128 + 128}]
    assert ask(batches, "shares(0, 1, 0, 16)") == [16, {"idle": 16 * 255}]
    # The next level's are 4 s wide: 0.25 s of 4 s are 16 of 255.
    assert ask(batches, "shares(1, 0, 0, 1)") == [1, {"decode": 16, "idle": 239}]


def test_the_bucket_that_is_being_filled_counts_as_far_as_it_is_full(ask):
    batches = [batch(0, stretch(0, 0, "ready"), stretch(0, 1, "idle")), batch(1)]
    count, sums = ask(batches, "shares(1, 0, 0, 1)")
    assert count == pytest.approx(1 / 4)
    assert sums == {"ready": pytest.approx(255 / 4)}


def test_stretches_that_look_alike_go_on(ask):
    batches = [
        batch(0, stretch(0, 0, "decode", 7, "in_round"), stretch(0, 1, "idle")),
        batch(2, stretch(1, 0, "decode", 7, "in_round")),
        batch(4, stretch(3, 0, "decode", 8, "in_round")),
    ]
    assert ask(batches, "history.lanes[0].length") == 2
    shown = ask(batches, "history.stretch(0, 0)")
    assert (shown["from"], shown["to"], shown["request"]) == (0, 3 * SECOND, 7)


def test_a_gap_is_not_known(ask):
    batches = [
        batch(0, stretch(0, 0, "decode", 7), stretch(0, 1, "idle"), head=HEAD),
        batch(8, stretch(8, 0, "idle"), stretch(8, 1, "idle"), head=HEAD, gap=True),
        batch(12),
    ]
    assert ask(batches, "history.gaps") == [[0, 8 * SECOND]]
    assert ask(batches, "shares(1, 0, 0, 3)") == [3, {"unknown": 510, "idle": 255}]


def test_rates_are_of_the_last_moments(ask):
    def figures(at_s: float, prompt: int, generated: int) -> list:
        return ["figures", round(at_s * SECOND), prompt, generated, 0, 0, 0]

    batches = [batch(0, figures(0, 0, 0)), batch(4, figures(2, 100, 10), figures(4, 500, 30))]
    assert ask(batches, "history.rates(history.nowNs, 2e9)") == {"prompt": 200, "answer": 10}


def test_the_older_half_is_forgotten(ask):
    """With room for 64, the 65th and the 97th of a hundred each make half of them go."""
    kept = ask(
        [batch(0)],
        """(() => {
             const series = new Series(["at", "value"], 64);
             for (let i = 0; i < 100; i++) series.push([i, 2 * i]);
             const { at, value } = series.columns;
             return [series.length, at[0], value[series.length - 1], series.forgotten];
           })()""",
    )
    assert kept == [36, 64, 198, True]


def test_a_long_history_is_bounded_and_still_whole(ask):
    """A million stretches on two slots, over three days: the widest buckets reach back to all."""
    expression = """(() => {
      for (let i = 0; i < 1_200_000; i++) {
        const look = i % 2 ? "decode" : "idle";
        history.addRecord(["slot", i * 216e6, 0, look, null, null, i, 0, []]);
      }
      const end = 1_200_000 * 216e6;
      history.advance(end);
      const level = history.levelFor(end / 1000, 0);
      const lane = history.lanes[0];
      return [lane.length <= lane.capacity, lane.capacity, lane.forgotten,
              level.width, level.first, shares(2, 0, 1, 3)];
    })()"""
    bounded, capacity, forgotten, width, first, (count, sums) = ask([batch(0)], expression)
    assert bounded and capacity == 1_000_000 and forgotten
    assert (width, first, count) == (64 * SECOND, 0, 2)
    assert sums["decode"] == pytest.approx(255, abs=4)
    assert sums["idle"] == pytest.approx(255, abs=4)
