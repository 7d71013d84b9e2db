"""Runs a preference optimisation job on trees: checks its command line as SFT's, then trains on pairs."""

from collections.abc import Sequence
from dataclasses import replace

from omegaconf import DictConfig, OmegaConf

from tree_rl.option_types import check_options
from tree_rl.verl_plugin.dpo.dpo_trainer import TreeDPOTrainer
from tree_rl.verl_plugin.engine.pair_loss import PairLoss
from tree_rl.verl_plugin.launch import sft
from tree_rl.verl_plugin.launch.command_line import refusals_as_one_line
from tree_rl.verl_plugin.options import TREE_LANGUAGE_MODEL
from tree_rl.verl_plugin.sft.sft_trainer import train

PROGRAM = replace(sft.PROGRAM, name="tree_rl.train dpo", config_name="tree_dpo_trainer")


def main(arguments: Sequence[str]) -> None:
    """Run a command line; if it cannot run, print one line and exit with code 2."""
    config = checked(arguments)
    sft.announce(config, f"{config.dpo.loss_type} loss of pairs")
    train(config, TreeDPOTrainer)


def checked(arguments: Sequence[str]) -> DictConfig:
    """Read and check the config of a command line; exits as `main`."""
    config = sft.checked(arguments, PROGRAM)
    with refusals_as_one_line():
        options = OmegaConf.to_container(config.dpo, resolve=True) if OmegaConf.is_config(config.dpo) else config.dpo
        check_options("dpo", options, PairLoss)
        PairLoss(**options)
        expected = {
            "model.model_type": (TREE_LANGUAGE_MODEL, None),
            "engine.tree.mode": ("auto", "tree"),
            "engine.tree.path_weighting": ("verl", None),
            "data.custom_cls.path": (None,),
        }
        for key, values in expected.items():
            value = OmegaConf.select(config, key, default=None)
            if value not in values:
                raise ValueError(f"{key}={value}: pairs train on trees alone, and weigh 1; leave it out")
    return config
