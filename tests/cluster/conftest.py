"""Jobs here run the toy model of the plugin's tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "verl_plugin"))
