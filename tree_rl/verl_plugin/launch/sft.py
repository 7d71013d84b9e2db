"""Runs a tree SFT job: checks its command line before an engine uses a GPU, then calls verl's trainer."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from tree_rl import __version__
from tree_rl.verl_plugin.launch.command_line import Program, check_tree_block, read_job, refusals_as_one_line
from tree_rl.verl_plugin.launch.model_check import refuse_model_of_job, refuse_rows_with_images
from tree_rl.verl_plugin.launch.short_forms import expand_sft, written_keys
from tree_rl.verl_plugin.refusals.job import refuse_engine, refuse_ranks
from tree_rl.verl_plugin.refusals.refusal import Of
from tree_rl.verl_plugin.refusals.table import refuse_if_unsupported
from tree_rl.verl_plugin.sft.sft_trainer import train

PROGRAM = Program(
    name="tree_rl.sft",
    folder=Path(__file__).parents[1],
    config_name="tree_sft_trainer",
    expand=expand_sft,
)


def main(arguments: Sequence[str]) -> None:
    """Run a command line of verl's `sft_trainer`; if it cannot run, print one line and exit with code 2."""
    config = checked(arguments)
    announce(config, "SFT")
    train(config)


def checked(arguments: Sequence[str], program: Program = PROGRAM) -> DictConfig:
    """Read and check the config of a command line; exits as `main`."""
    with refusals_as_one_line():
        config, given = read_job(arguments, program)
        refuse_if_unsupported(config, "", Of.VALUES, Of.SFT)
        check_tree_block(config.engine, "engine", written_keys(given))
        refuse_ranks(config.engine, "engine", int(os.environ.get("WORLD_SIZE", "1")))
        refuse_engine(config.model, config.engine, key="engine")
        refuse_if_unsupported(config, "", Of.FILES)
        refuse_if_unsupported(config.model, "model", Of.MODEL_FILES)
        refuse_model_of_job(config.model, key="model", engines={"engine": config.engine})
        refuse_rows_with_images(config.data)
    return config


def announce(config: DictConfig, what: str) -> None:
    """Print a one-line summary of the job, once for all ranks."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(banner(config, what), file=sys.stderr, flush=True)


def banner(config: DictConfig, what: str) -> str:
    """A one-line summary of the job; `what` names the training."""
    tree = config.engine.get("tree", None) or {}
    facts = f"mode {tree.get('mode', 'auto')}; attention {tree.get('attention', 'auto')}"
    return f"tree_rl {__version__}: {what} on {config.engine.strategy}; {facts}"
