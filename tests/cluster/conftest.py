"""Jobs here run the toy model of the plugin's tests, and wait as the rollout's do."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("verl_plugin", "rollout")]
