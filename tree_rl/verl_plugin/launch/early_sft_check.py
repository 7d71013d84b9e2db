"""Checks the command line of tree SFT before Hydra reads it: a mistake ends it with one line and exit code 2."""

import os
import sys
from collections.abc import Sequence

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tree_rl import __version__
from tree_rl.verl_plugin.did_you_mean import did_you_mean
from tree_rl.verl_plugin.engine.features import refuse_engine_options, refuse_model_options
from tree_rl.verl_plugin.launch.compose import CommandLineError, compose, explain, is_of_hydra, one_line
from tree_rl.verl_plugin.launch.compose import read_command_line as read
from tree_rl.verl_plugin.launch.early_check import INPUT_ERROR
from tree_rl.verl_plugin.launch.job_checks import check_kinds, missing_files
from tree_rl.verl_plugin.launch.model_check import refuse_model_of_job, refuse_rows_with_images
from tree_rl.verl_plugin.launch.tree_arguments import written_keys
from tree_rl.verl_plugin.options import as_tree_config

CONFIG_PATH, CONFIG_NAME = "pkg://tree_rl.verl_plugin.config", "tree_sft_trainer"
MACHINES = {"cpu": "sft_cpu", "gpu": "sft_gpu"}
"""What the user may write, and the config of that name."""
COUNTS = ("data.train_batch_size", "data.max_token_len_per_gpu", "data.max_length", "trainer.total_epochs")
FILES = ("data.train_files", "data.val_files")


def check_sft(arguments: list[str]) -> None:
    """Check the command line and write out its short forms, in place; exit after one line where SFT cannot run.

    `tree.KEY=V` is `engine.tree.KEY=V`, `machine=cpu` is `machine=sft_cpu`.
    """
    try:
        line = read(arguments, config_path=CONFIG_PATH, config_name=CONFIG_NAME)
        if line is None:
            return
        overrides = expand(line.overrides)
        try:
            config = compose(line, overrides)
            stock = compose(line, [text for text in overrides if is_of_hydra(text)])
        except (HydraException, OmegaConfBaseException) as error:
            raise explain(error, line, overrides) from error
        _check(config, stock, line.overrides)
    except CommandLineError as error:
        print(f"tree_rl: {error}", file=sys.stderr)
        sys.exit(INPUT_ERROR)
    flags = list(arguments[1:])
    for override in line.overrides:
        flags.remove(override)
    arguments[1:] = [*flags, *overrides]
    if int(os.environ.get("RANK", "0")) == 0:
        tree = config.engine.get("tree", None) or {}
        facts = f"mode {tree.get('mode', 'auto')}; attention {tree.get('attention', 'auto')}"
        print(f"tree_rl {__version__}: SFT on {config.engine.strategy}; {facts}", file=sys.stderr, flush=True)


def expand(overrides: Sequence[str]) -> list[str]:
    """Write out the short forms.

    Raises:
        CommandLineError: a machine that is none.
    """
    expanded = []
    for override in overrides:
        key, sign, value = override.partition("=")
        if key == "machine":
            known = (*MACHINES, *MACHINES.values())
            if value not in known:
                raise CommandLineError(
                    f"machine={value}: expected one of {', '.join(known)}{did_you_mean(value, known)}"
                )
            override = f"machine={MACHINES.get(value, value)}"
        elif key.startswith("tree.") and sign:
            override = f"++engine.{override}"
        expanded.append(override)
    return expanded


def _check(config: DictConfig, stock: DictConfig, given: Sequence[str]) -> None:
    try:
        check_kinds(config, stock, given)
        strategy = config.engine.strategy
        if strategy != "fsdp2":
            raise CommandLineError(f"engine.strategy={strategy}: trees run on FSDP2; set engine.strategy=fsdp2")
        short = any(key.startswith("tree.") for key in written_keys(given))
        _check_tree_block(config, "tree." if short else "engine.tree.")
        for key in COUNTS:
            value = OmegaConf.select(config, key, default=None)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise CommandLineError(f"{key}={value}: expected a whole number of at least 1")
        refuse_model_options(config.model, is_value=False, key="model")
        refuse_engine_options(config.engine, is_value=False, key="engine")
        missing_files(config, FILES, ("model",))
        refuse_model_of_job(config.model, key="model", engines={"engine": config.engine})
        refuse_rows_with_images(config.data, ("train_files", "val_files"))
    except CommandLineError:
        raise
    except (ValueError, TypeError, AssertionError, OSError, OmegaConfBaseException, HydraException) as error:
        raise CommandLineError(one_line(error)) from error


def _check_tree_block(config: DictConfig, prefix: str) -> None:
    block = config.engine.get("tree", None)
    try:
        as_tree_config(None if block is None else OmegaConf.to_container(block, resolve=True))
    except ValueError as error:
        raise CommandLineError(one_line(error).replace("tree.", prefix, 1)) from error
