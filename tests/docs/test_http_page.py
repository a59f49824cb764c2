"""Goal: docs/http.md tells of the routes, errors and figures that there are.

Method: its tables are compared with the table of routes, the statuses of errors, and a scrape.
"""

import re
from typing import get_args

from pages import DOCS, table
from prometheus_client.parser import text_string_to_metric_families

from phaseloop.core.policy import PRESETS
from phaseloop.core.state import initial
from phaseloop.engine.protocol import Description, limits_of
from phaseloop.http import later, page
from phaseloop.http.app import ROWS
from phaseloop.http.errors import STATUS
from phaseloop.http.histograms import Durations
from phaseloop.http.metrics import phaseloop
from phaseloop.http.phase import SETTINGS
from phaseloop.runtime import timeline
from phaseloop.runtime.tally import Tally
from phaseloop.runtime.watch import Counters

PAGE = (DOCS / "http.md").read_text()
EMPTY = Description(name="none", slot_count=1, batch_tokens=1, context_length=1, page_count=1)


def paths(cell: str) -> tuple[str, ...]:
    return tuple(re.findall(r"`([^`]+)`", cell))


def test_the_routes_are_those_of_the_table():
    refused = {(row.method, row.paths) for row in later.ROWS}
    answered = [(row.method, row.paths) for row in ROWS if (row.method, row.paths) not in refused]
    answered = [row if row != ("GET", page.PARTS) else ("GET", ("/page/",)) for row in answered]
    answered += [("POST", ("/props",))]  # later's, which answers
    documented = [(row[0], paths(row[1])) for row in table(PAGE, "routes")]
    assert sorted(documented) == sorted(answered)


def test_the_errors_are_those_of_the_code():
    documented = {row[0].strip("`"): int(row[1]) for row in table(PAGE, "errors")}
    assert documented == STATUS


class Idle:
    """What a scrape reads of a service."""

    state = initial(limits_of(EMPTY), PRESETS["mixed"])

    class watch:
        counters = Counters(ends={"stop": 1})
        tally = Tally()


def test_the_figures_are_those_of_a_scrape():
    text = phaseloop(Idle, Durations())
    scraped = [(family.name, family.type) for family in text_string_to_metric_families(text)]
    documented = [(row[0].strip("`"), row[1]) for row in table(PAGE, "metrics")]
    assert documented == scraped


def test_the_settings_of_a_policy_are_named():
    section = PAGE.split("## The phase")[1].split("\n## ")[0]
    assert set(re.findall(r"`(\w+_ms)`", section)) - {"since_ms"} == set(SETTINGS)


def test_the_records_of_the_timeline_are_those_of_the_code():
    documented = {row[0].strip("`"): paths(row[1].split(":")[0]) for row in table(PAGE, "records")}
    records = {
        str(record.__struct_config__.tag): record.__struct_fields__
        for record in get_args(timeline.AnyRecord)
    }
    assert documented == records


def test_the_looks_are_those_of_the_code():
    documented = {row[0].strip("`"): row[1] for row in table(PAGE, "looks")}
    assert documented == timeline.LOOKS
