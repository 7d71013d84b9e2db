"""The quickstart's package lies in recipes/, where its scripts find it through PYTHONPATH."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
