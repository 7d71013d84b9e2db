"""Overrides of verl that README.md and the documents name are keys of its config; tests/docs runs their commands."""

import re
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module

from tree_rl.verl_plugin.launch.short_forms import expand

ROOT = Path(__file__).parents[2]
OVERRIDE = re.compile(r"(?<![\w.])(\+?(?:trainer|actor_rollout_ref|critic)(?:\.\w+)+=\w+)")


@pytest.mark.parametrize("document", ["README.md", "docs/configuration.md", "docs/faq.md", "docs/troubleshooting.md"])
def test_overrides_fit_into_stock_verl(document: str) -> None:
    overrides = sorted(set(OVERRIDE.findall((ROOT / document).read_text(encoding="utf-8"))))
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=expand(overrides, "ppo_trainer"))
    assert config.trainer.v1.trainer_mode in ("tree_sync", "sync")
