"""How every test runs: which Hypothesis profile, how many threads, which warnings are expected."""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

# A case that stock refuses is dropped, so some rows drop many.
COMMON = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.filter_too_much, HealthCheck.too_slow],
}
settings.register_profile("dev", max_examples=5, **COMMON)
settings.register_profile("ci", max_examples=20, derandomize=True, database=None, **COMMON)
settings.register_profile("thorough", max_examples=500, **COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

torch.set_num_threads(1)  # pytest-xdist has a process per core already


def pytest_configure(config: pytest.Config) -> None:
    # torch warns that "same" pads a copy of x where the two sides differ. Stock and ours alike.
    config.addinivalue_line(
        "filterwarnings", "ignore:Using padding='same' with even kernel lengths:UserWarning"
    )
