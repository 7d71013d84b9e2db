"""Attacks are played on the tasks of the rollout's tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))
