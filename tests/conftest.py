"""How property tests run here: as long as they need, and in CI the same way every time."""

import os

from hypothesis import HealthCheck, settings

# A busy machine is no failure: no deadline per example, no complaint about slow drawing.
settings.register_profile(
    "phaseloop",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=bool(os.environ.get("CI")),
)
settings.load_profile("phaseloop")
