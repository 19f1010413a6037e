"""What all tests share: hypothesis without a deadline, and an environment that knows of no launcher."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# The machine may be loaded: how long an example takes says nothing about the code.
settings.register_profile(
    "paceline", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("paceline")

# Started under a launcher, pytest would hand its rank to every test. Before any test imports anything.
for _name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(_name, None)
os.environ.pop("PACELINE_JOB_ID", None)
