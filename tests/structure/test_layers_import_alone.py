"""Each layer imports in a fresh interpreter without what only higher layers may know."""

import json
import os
import subprocess
import sys

import pytest

VERL_SIDE = ("verl", "ray", "vllm")
TORCH_SIDE = ("torch", "triton", "transformers")
WITHOUT = {
    "tree_rl.tree": VERL_SIDE + TORCH_SIDE,
    "tree_rl.cost.cluster.step": VERL_SIDE + TORCH_SIDE,
    "tree_rl.rollout": VERL_SIDE + TORCH_SIDE,
    "tree_rl.inspection.row_file": VERL_SIDE + TORCH_SIDE,
    "tree_rl.viewer.page": VERL_SIDE + TORCH_SIDE,
    "tree_rl.cli": VERL_SIDE + TORCH_SIDE,
    "tree_kernels": (*VERL_SIDE, "transformers", "tree_rl"),
    "tree_rl.models": VERL_SIDE,
    "tree_rl.training": VERL_SIDE,
    "tree_rl.training.whole": VERL_SIDE,
}


def modules_after_import(name: str) -> set[str]:
    code = f"import json, sys, {name}; print(json.dumps(sorted({{m.partition('.')[0] for m in sys.modules}})))"
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment, timeout=120
    ).stdout
    return set(json.loads(printed))


@pytest.mark.parametrize("name", WITHOUT)
def test_layer_imports_without_what_is_above_it(name: str) -> None:
    loaded = modules_after_import(name)
    assert name.partition(".")[0] in loaded
    assert not loaded & set(WITHOUT[name])
