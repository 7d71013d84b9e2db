"""Every recipe composes over verl's configs, and its engine blocks build."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from tree_rl.verl_plugin.options import as_tree_config

RECIPES = Path(__file__).parents[2] / "recipes"
CONFIGS = sorted(path for path in RECIPES.glob("*/*.yaml") if "defaults:" in path.read_text(encoding="utf-8"))


def tree_blocks(node: DictConfig) -> list[DictConfig]:
    """Every `tree:` node below a node."""
    found = []
    for key in node:
        value = node._get_node(key)
        if isinstance(value, DictConfig) and not value._is_none():
            found += [value] if key == "tree" else tree_blocks(value)
    return found


def composed(path: Path, *overrides: str) -> DictConfig:
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(path.parent), version_base=None):
        return compose(path.stem, list(overrides))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_recipe_composes_states_valid_tree_options_and_counts_micro_batches_in_tokens_on_a_gpu_too(path: Path) -> None:
    blocks = tree_blocks(composed(path))
    assert blocks and len(CONFIGS) >= 3
    for block in blocks:
        as_tree_config(OmegaConf.to_container(block))
    if "ppo_trainer" in path.read_text(encoding="utf-8"):
        # Without it verl wants a number of rows, which no recipe sets; machine=cpu sets it, machine=gpu does not.
        assert composed(path, "machine=gpu").actor_rollout_ref.actor.use_dynamic_bsz is True
