"""The script of docs/from_verl.md is verl's without the marked lines, and a job on trees with them."""

import re
import shlex
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from jobs import check_train, on_this_machine
from shell_blocks import ROOT

from tree_rl.verl_plugin.launch.short_forms import expand

PAGE = (ROOT / "docs" / "from_verl.md").read_text(encoding="utf-8")


def script(*, of_trees: bool) -> list[str]:
    """The words of verl's command, or of ours."""
    (block,) = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)
    lines = [line[1:] for line in block.splitlines() if line[0] in (" +" if of_trees else " -")]
    return shlex.split(" ".join(line.removesuffix("\\") for line in lines))


def test_stock_verl_takes_its_lines() -> None:
    stock, tree = script(of_trees=False), script(of_trees=True)
    assert stock[:3] == ["python", "-m", "verl.trainer.main_ppo"] and tree[:3] == ["python", "-m", "tree_rl.train"]
    assert len(tree) == len(stock) + 1
    with initialize_config_module("verl.trainer.config", version_base=None):
        assert compose("ppo_trainer", overrides=stock[3:]).actor_rollout_ref.rollout.n == 16


def test_the_marked_lines_make_it_a_job_on_trees(tmp_path: Path) -> None:
    check_train(on_this_machine(script(of_trees=True)[3:], tmp_path))


@pytest.mark.parametrize("table", ["Line by line", "More of it"])
def test_keys_of_the_tables_exist(table: str) -> None:
    section = PAGE.split(f"## {table}")[1].split("\n## ")[0]
    spans = re.findall(r"`([^`]+=[^`]+)`", section)
    overrides = [span for span in spans if not span.startswith(("...", "tree.")) and " " not in span]
    # Values that only Megatron has compose a config of its own.
    overrides = [span for span in overrides if "fused" not in span]
    assert overrides
    overrides = expand(overrides, "ppo_trainer")
    with initialize_config_module("verl.trainer.config", version_base=None):
        while overrides:
            once = {override.partition("=")[0]: override for override in overrides}
            compose("ppo_trainer", overrides=list(once.values()))
            overrides = [override for override in overrides if override not in once.values()]
