"""Goal: the Grafana dashboard shows figures that a server has, by labels that they have.

Method: every metric and label named in a query of the file is looked up in the text of a scrape.
"""

import json
import re

import pytest
from msgspec.structs import replace
from pages import DOCS
from prometheus_client.parser import text_string_to_metric_families

from phaseloop.core.policy import PRESETS
from phaseloop.core.state import initial
from phaseloop.core.vocabulary import ClientResumed
from phaseloop.engine.protocol import Description, limits_of
from phaseloop.http.histograms import Durations
from phaseloop.http.metrics import llamacpp, phaseloop
from phaseloop.runtime.tally import Tally
from phaseloop.runtime.watch import Counters

DASHBOARD = json.loads((DOCS / "grafana-dashboard.json").read_text())
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
STATE = initial(
    limits_of(Description("none", slot_count=1, batch_tokens=1, context_length=1, page_count=1)),
    PRESETS["barrier-fair"],
)
GIVEN_BY_PROMETHEUS = {"job", "instance", "le", "__name__"}


def tally() -> Tally:
    """With one of everything that has a label."""
    one = Tally()
    one.on_round("decode", 1, 1, 1)
    event = ClientResumed(at_ns=0, request_id=0)
    sealed = replace(STATE, sealed=True)
    one.observe(event, STATE, sealed, ())
    return one


class Served:
    """What a scrape reads of a service."""

    state = STATE

    class watch:
        counters = Counters(ends={"stop": 1})
        tally = tally()


def scraped() -> dict[str, set[str]]:
    """The labels of each sample that a server shows."""
    text = llamacpp(STATE, Served.watch.counters, Served.watch.counters)
    text += phaseloop(Served, Durations())
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_a_query_asks_for_what_there_is(expression):
    known = scraped()
    names = re.findall(r'__name__="([^"]+)"', expression)
    assert names
    for name in names:
        assert name in known, name
    labels = set(re.findall(r"[{,](\w+)=", expression))
    for grouped in re.findall(r"by \(([^)]*)\)", expression):
        labels |= set(re.split(r",\s*", grouped))
    assert labels - GIVEN_BY_PROMETHEUS <= set().union(*(known[name] for name in names))
    assert expression.count("(") == expression.count(")")


def test_panels_have_their_place():
    taken = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
