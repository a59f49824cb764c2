"""How property tests run here: as long as they need, and in CI the same way every time.

And where the real model is that some tests ask: the fixture `smollm2` pulls it once.
"""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from phaseloop.cli.errors import UserError
from phaseloop.cli.pull import fetch

# A busy machine is no failure: no deadline per example, no complaint about slow drawing.
settings.register_profile(
    "phaseloop",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=bool(os.environ.get("CI")),
)
settings.load_profile("phaseloop")

TEST_MODEL = "smollm2-135m"
FETCH_S_MAX = 900  # the first test that asks for the model may wait for its download
missing: list[str] = []  # why the model is not there


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The file of SmolLM2-135M-Instruct Q4_1.

    PHASELOOP_TEST_MODEL names it, or it is in the cache of `phaseloop pull`, or it is pulled now.
    """
    named = os.environ.get("PHASELOOP_TEST_MODEL")
    if named:
        path = Path(named)
        assert path.is_file(), f"PHASELOOP_TEST_MODEL: there is no file {path}"
        return path
    if not missing:
        try:
            return fetch(TEST_MODEL)
        except UserError as error:
            missing.append(str(error))
    pytest.skip(f"{TEST_MODEL} cannot be pulled: {missing[0]}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "smollm2" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(FETCH_S_MAX))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if missing:
        terminalreporter.section(f"no {TEST_MODEL}", red=True, bold=True)
        terminalreporter.line(missing[0])
        terminalreporter.line(
            "The tests with the real model were skipped, so what phaseloop promises of its answers "
            f"was not checked.  `phaseloop pull {TEST_MODEL}` fetches it; PHASELOOP_TEST_MODEL may "
            "name the file instead."
        )
