"""The real trajectories."""

from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="session")
def airline_trajectories() -> Path:
    """200 recorded tool-use trajectories: 50 tasks, 4 trials each."""
    return EXAMPLES / "tau_bench_airline" / "trajectories.json"
