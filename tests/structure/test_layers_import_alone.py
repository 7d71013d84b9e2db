"""Each layer imports in a fresh interpreter without what only higher layers may know."""

import json
import os
import subprocess
import sys

import pytest

VERL_SIDE = ("verl", "ray", "vllm")
TORCH_SIDE = ("torch", "triton", "transformers")
WITHOUT = {
    (
        *("tree_rl.tree", "tree_rl.cost.cluster.step", "tree_rl.rollout", "tree_rl.inspection.row_file"),
        *("tree_rl.viewer.page", "tree_rl.cli"),
    ): VERL_SIDE + TORCH_SIDE,
    ("tree_kernels",): (*VERL_SIDE, "transformers", "tree_rl"),
    ("tree_rl.models", "tree_rl.training.loss.edges"): VERL_SIDE,
}
"""Modules that one interpreter imports -> what none of them loads."""


def modules_after_import(names: tuple[str, ...]) -> set[str]:
    code = (
        f"import json, sys, {', '.join(names)}; print(json.dumps(sorted({{m.partition('.')[0] for m in sys.modules}})))"
    )
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment, timeout=120
    ).stdout
    return set(json.loads(printed))


@pytest.mark.parametrize("names", WITHOUT, ids=" ".join)
def test_layers_import_without_what_is_above_them(names: tuple[str, ...]) -> None:
    loaded = modules_after_import(names)
    assert names[0].partition(".")[0] in loaded
    assert not loaded & set(WITHOUT[names])
