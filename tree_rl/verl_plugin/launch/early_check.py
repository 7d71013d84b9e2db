"""Checks a job on trees after the imports and before Ray: a mistake ends the driver with one line and exit code 2.

verl offers no hook between its imports and Hydra's reading of sys.argv. main_ppo imports `verl.trainer.constants_ppo`
there, so the plugin looks at sys.argv when that module has loaded.
"""

import contextlib
import io
import sys
import warnings
from collections.abc import Sequence
from pathlib import PurePath

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tree_rl import __version__
from tree_rl.verl_plugin.launch.compose import (
    TRAINS,
    CommandLine,
    CommandLineError,
    compose,
    explain,
    is_of_hydra,
    trains_trees,
)
from tree_rl.verl_plugin.launch.compose import read_command_line as read
from tree_rl.verl_plugin.launch.tree_arguments import ENGINE_CONFIG, ENGINES, MACHINES, STOCK_CONFIG, expand
from tree_rl.verl_plugin.launch.tree_arguments import written_keys as written

INPUT_ERROR = 2
"""Exit code, as of `tree-rl`'s commands."""
ROLES = ("actor_rollout_ref.actor", "critic")
"""Roles whose strategy a user writes; the reference policy's follows the actor's."""


def check_main_ppo(arguments: list[str]) -> None:
    """Check and complete the command line of verl's main_ppo, in place; leave every other program and job alone.

    Prints a banner for a job on trees. Exits with code 2 after one line on standard error where the job cannot run.
    """
    if PurePath(arguments[0]).parts[-3:] != ("verl", "trainer", "main_ppo.py"):
        return
    try:
        line = read(arguments, config_path="config", config_name=STOCK_CONFIG)
        if line is None:
            return
        overrides, banner = checked(line)
    except CommandLineError as error:
        print(f"tree_rl: {error}", file=sys.stderr)
        sys.exit(INPUT_ERROR)
    flags = list(arguments[1:])
    for override in line.overrides:
        flags.remove(override)
    arguments[1:] = [*flags, *overrides]
    if banner:
        print(banner, file=sys.stderr, flush=True)


def checked(line: CommandLine) -> tuple[list[str], str]:
    """Check a job.

    Returns: the overrides with which it runs, and the banner; the banner is empty for a job without trees, whose
        overrides are as they were.

    Raises:
        CommandLineError: a job on trees that cannot run.
    """
    given = list(line.overrides)
    overrides = expand(given, config_name=line.config_name)
    if not _names_trees(line, overrides, given):
        return given, ""
    # It imports verl's algorithms, which a job without trees may not need in this process.
    from tree_rl.verl_plugin.launch.job_checks import check_job, check_words

    check_words(given, MACHINES)
    try:
        config = compose(line, overrides)
        stock = compose(line, [text for text in overrides if is_of_hydra(text)])
    except (HydraException, OmegaConfBaseException) as error:
        raise explain(error, line, overrides) from error
    added, notes = complete(config, given)
    overrides += added
    # verl prints that its checks passed; what they warn of, they print again.
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_job(config, stock, given)
    return overrides, _banner(config, notes) if trains_trees(config) else ""


def _names_trees(line: CommandLine, overrides: Sequence[str], given: Sequence[str]) -> bool:
    """Whether the arguments, or else the named config without them, ask for trees."""
    pairs = [(key.lstrip("+"), value) for key, _, value in (argument.partition("=") for argument in given)]
    if overrides != given or any(key in TRAINS and value.startswith("tree") for key, value in pairs):
        return True
    if line.config_name == STOCK_CONFIG:
        return False
    try:
        return trains_trees(compose(line, []))
    except (HydraException, OmegaConfBaseException):
        return False


def complete(config: DictConfig, given: Sequence[str]) -> tuple[list[str], list[str]]:
    """Choose FSDP2 and the class of the `tree` block where the user chose neither.

    Args:
        config: verl's, changed in place.
        given: the user's overrides.

    Returns: overrides that do so, and what the banner says about them.
    """
    keys, added, notes = written(given), [], []
    for role in ROLES if trains_trees(config) else ():
        key = f"{role}.strategy"
        if key not in keys and OmegaConf.select(config, key, default=None) == "fsdp":
            added.append(f"{key}=fsdp2")
            notes.append(f"{key}=fsdp2 in place of verl's default fsdp")
    for engine in ENGINES:
        node = OmegaConf.select(config, engine, default=None)
        if node is not None and node.get("tree", None) is not None and node.get("_target_", None) != ENGINE_CONFIG:
            added.append(f"++{engine}._target_={ENGINE_CONFIG}")
    if config.trainer.get("balance_batch", True) is not True:
        notes.append(
            f"trainer.balance_batch={config.trainer.balance_batch} has no effect: verl's V1 trainers do not read it, "
            "and give ranks about equal work"
        )
    for override in added:
        key, _, value = override.lstrip("+").partition("=")
        OmegaConf.update(config, key, value, force_add=True)
    return added, notes


def _banner(config: DictConfig, notes: Sequence[str]) -> str:
    actor = config.actor_rollout_ref
    tree = actor.actor.fsdp_config.get("tree", None) or {}
    facts = [
        f"engine {actor.model.get('model_type', None) or 'tree_language_model'} on {actor.actor.strategy}",
        f"trainer {config.trainer.v1.trainer_mode}",
        f"mode {tree.get('mode', 'auto')}",
        f"attention {tree.get('attention', 'auto')}",
        f"max_tokens {tree.get('max_tokens', None) or _verls_budget(actor.actor)}",
        *notes,
    ]
    return f"tree_rl {__version__}: {'; '.join(facts)}"


def _verls_budget(role: DictConfig) -> str:
    """What bounds a forward of a role where `tree.max_tokens` does not."""
    if role.get("use_dynamic_bsz", False):
        return str(role.get("ppo_max_token_len_per_gpu", None))
    rows = role.get("ppo_micro_batch_size_per_gpu", None) or 1
    return f"of {rows} longest rows (ppo_micro_batch_size_per_gpu, as use_dynamic_bsz=False)"
