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


def test_there_are_recipes() -> None:
    assert len(CONFIGS) >= 3


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_recipe_composes_and_states_valid_tree_options(path: Path) -> None:
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(path.parent), version_base=None):
        config = compose(path.stem)
    blocks = tree_blocks(config)
    assert blocks
    for block in blocks:
        as_tree_config(OmegaConf.to_container(block))
