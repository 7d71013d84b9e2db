"""The script of docs/from_verl.md is verl's without the marked line, and a job on trees with it; overrides of verl that
the documents name are keys of its config."""

import re
import shlex
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from jobs import check_train, on_this_machine
from omegaconf import OmegaConf
from shell_blocks import ROOT

from tree_rl.verl_plugin.launch.short_forms import expand

PAGE = (ROOT / "docs" / "from_verl.md").read_text(encoding="utf-8")


def script(*, of_trees: bool) -> list[str]:
    """The words of verl's command, without or with the marked line."""
    (block,) = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)
    lines = [line[1:] for line in block.splitlines() if line[0] in (" +" if of_trees else " -")]
    return shlex.split(" ".join(line.removesuffix("\\") for line in lines))


def overrides_of(words: list[str]) -> list[str]:
    """What follows verl's program."""
    return words[words.index("verl.trainer.main_ppo") + 1 :]


def test_stock_verl_takes_its_lines_and_the_marked_one_makes_it_a_job_on_trees(tmp_path: Path) -> None:
    stock, tree = script(of_trees=False), script(of_trees=True)
    assert [word for word in tree if word not in stock] == ["trainer.v1.trainer_mode=tree_sync"]
    with initialize_config_module("verl.trainer.config", version_base=None):
        assert compose("ppo_trainer", overrides=overrides_of(stock)).actor_rollout_ref.rollout.n == 5
    check_train(on_this_machine(overrides_of(tree), tmp_path))


def test_keys_that_stand_for_those_of_others_exist() -> None:
    section = PAGE.split("## From AReaL, TRL or ART")[1]
    keys = re.findall(r"`((?:actor_rollout_ref|algorithm|critic|data|reward|trainer)(?:\.\w+)+)[=`]", section)
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer")
    missing = object()
    assert len(keys) > 5
    assert not [key for key in keys if OmegaConf.select(config, key, default=missing) is missing]


@pytest.mark.parametrize("table", ["Line by line", "Checkpoints, resume, export"])
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


@pytest.mark.parametrize("document", ["README.md", "docs/configuration.md", "docs/faq.md", "docs/troubleshooting.md"])
def test_overrides_fit_into_stock_verl(document: str) -> None:
    named = re.compile(r"(?<![\w.])(\+?(?:trainer|actor_rollout_ref|critic)(?:\.\w+)+=\w+)")
    overrides = sorted(set(named.findall((ROOT / document).read_text(encoding="utf-8"))))
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=expand(overrides, "ppo_trainer"))
    assert config.trainer.v1.trainer_mode in ("tree_sync", "sync")
