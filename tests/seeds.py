"""How hypothesis chooses: the same examples every time, unless somebody asks for a long search.

REGATE_LONG=1 looks further, with fresh chance, and prints what reproduces a failure.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

LONG = os.environ.get("REGATE_LONG") == "1"
_SLOW = (HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large, HealthCheck.large_base_example)

settings.register_profile(
    "ci", derandomize=True, database=None, deadline=None, max_examples=120, stateful_step_count=50,
    suppress_health_check=_SLOW,
)  # fmt: skip
settings.register_profile(
    "long", database=None, deadline=None, max_examples=4_000, stateful_step_count=120, print_blob=True,
    suppress_health_check=_SLOW, phases=(Phase.explicit, Phase.generate, Phase.shrink),
)  # fmt: skip


def load() -> None:
    """Use the profile that the environment asks for."""
    settings.load_profile("long" if LONG else "ci")
