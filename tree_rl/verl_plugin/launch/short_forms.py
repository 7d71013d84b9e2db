"""Expands the short forms of tree options on a command line to Hydra's overrides."""

from collections.abc import Iterable

from tree_rl.verl_plugin.did_you_mean import did_you_mean
from tree_rl.verl_plugin.options import ENGINES

OF_THE_ACTOR_ALONE = ("reuse_log_probs", "router_aux_loss_coef")
"""Options of `tree` that the short form sets only on the actor."""
STOCK_CONFIG = "ppo_trainer"
MACHINES = ("cpu", "gpu")
SEARCH_PATH = "hydra.searchpath"
MODEL_TYPE_KEYS = ("actor_rollout_ref.model.model_type", "critic.model.model_type")
"""Fields of verl's HFModelConfig that verl's YAML lacks, so that Hydra only accepts them with `++`."""


class CommandLineError(ValueError):
    """An unusable command line; the message is one line and says what to write instead."""


def expand(arguments: Iterable[str], config_name: str) -> list[str]:
    """Expand short forms of reinforcement learning; keep every other argument.

    `tree.KEY=V` sets the option on every engine; `ENGINE.tree.KEY=V` or `ENGINE.tree={KEY:V}` overrides it on one.
    `machine=cpu` on verl's config adds the config group that tree_rl's recipes have among their defaults.

    Raises:
        CommandLineError: an unknown machine.
    """
    arguments = list(arguments)
    general, specific = [], []
    for argument in arguments:
        key, sign, value = argument.partition("=")
        bare = key.lstrip("+")
        if bare == "machine":
            _check_machine(value, MACHINES)
        if bare == "machine" and config_name == STOCK_CONFIG:
            specific.append(f"+machine={value}")
            if not any(other.startswith(f"{SEARCH_PATH}=") for other in arguments):
                specific.append(f"{SEARCH_PATH}=[pkg://tree_rl.verl_plugin.config]")
        elif bare.startswith("tree.") and sign:
            engines = ENGINES[:1] if bare.removeprefix("tree.") in OF_THE_ACTOR_ALONE else ENGINES
            general += [f"++{engine}.{bare}={value}" for engine in engines]
        elif key in MODEL_TYPE_KEYS or f"{bare}.".startswith(tuple(f"{engine}.tree." for engine in ENGINES)):
            specific.append(f"++{bare}={value}")
        else:
            specific.append(argument)
    return general + specific


def expand_sft(arguments: Iterable[str], _: str) -> list[str]:
    """Expand short forms of SFT: `tree.KEY=V` is `engine.tree.KEY=V`, `machine=cpu` is `machine=sft_cpu`."""
    expanded = []
    for argument in arguments:
        key, sign, value = argument.partition("=")
        if key == "machine":
            _check_machine(value, (*MACHINES, *(f"sft_{name}" for name in MACHINES)))
            argument = f"machine=sft_{value.removeprefix('sft_')}"
        elif key.lstrip("+").startswith("tree.") and sign:
            argument = f"++engine.{argument.lstrip('+')}"
        expanded.append(argument)
    return expanded


def _check_machine(value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise CommandLineError(f"machine={value}: expected one of {', '.join(known)}{did_you_mean(value, known)}")


def written_keys(arguments: Iterable[str]) -> list[str]:
    """The keys of arguments, without Hydra's prefixes."""
    return [argument.partition("=")[0].lstrip("+~") for argument in arguments]
