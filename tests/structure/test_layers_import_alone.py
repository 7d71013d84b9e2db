"""What needs no torch imports in a fresh interpreter without it; `lint-imports` holds the layers above."""

import json
import os
import subprocess
import sys

WITHOUT_TORCH = (
    *("tree_rl.tree", "tree_rl.cost.cluster.step", "tree_rl.rollout", "tree_rl.inspection.row_file"),
    *("tree_rl.viewer.page", "tree_rl.cli"),
)
ABSENT = {"verl", "ray", "vllm", "torch", "triton", "transformers"}


def test_what_needs_no_torch_loads_none() -> None:
    code = (
        f"import json, sys, {', '.join(WITHOUT_TORCH)}; print(json.dumps([m.partition('.')[0] for m in sys.modules]))"
    )
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment, timeout=120
    ).stdout
    loaded = set(json.loads(printed))
    assert "tree_rl" in loaded and not loaded & ABSENT
