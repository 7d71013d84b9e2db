"""What a user may write on verl's command line about trees, as Hydra wants it."""

from collections.abc import Iterable

ENGINES = ("actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.ref.fsdp_config", "critic.fsdp")
"""Where verl's RL config holds an engine's options: of the actor, the reference policy and the critic."""
OF_THE_ACTOR_ALONE = ("reuse_log_probs", "router_aux_loss_coef")
"""Options of `tree` that the short form leaves at their defaults elsewhere."""
ENGINE_CONFIG = "tree_rl.verl_plugin.options.TreeFSDPEngineConfig"
STOCK_CONFIG = "ppo_trainer"
MACHINES = ("cpu", "gpu")
SEARCH_PATH = "hydra.searchpath"
MODEL_TYPE_KEYS = ("actor_rollout_ref.model.model_type", "critic.model.model_type", "model.model_type")


def accept_model_type(arguments: list[str]) -> None:
    """Put `++` before `...model.model_type=tree...` in `sys.argv`, in place; every other argument stays."""
    # `model_type` is a field of verl's HFModelConfig that verl's yaml lacks, and Hydra accepts such a key only as
    # `++key=value`. verl offers no hook between loading its plugins and Hydra's reading of sys.argv, so the plugin
    # edits sys.argv while it loads. tests/verl_plugin/test_trainer_drop_in.py guards this.
    for index, argument in enumerate(arguments):
        key, _, value = argument.partition("=")
        if key in MODEL_TYPE_KEYS and value.startswith("tree"):
            arguments[index] = f"++{argument}"


def expand(arguments: Iterable[str], *, config_name: str) -> list[str]:
    """Rewrite short forms; every other argument stays.

    `tree.KEY=V` sets the option on every engine, `ENGINE.tree.KEY=V` on one; both name the config class that has the
    block. `machine=cpu` on verl's own config adds the group that tree_rl's recipes list among their defaults.

    Args:
        arguments: overrides of Hydra.
        config_name: of the primary config.
    """
    arguments = list(arguments)
    general, specific = [], []
    for argument in arguments:
        key, sign, value = argument.partition("=")
        bare = key.lstrip("+")
        engine, _, option = bare.partition(".tree.")
        if bare == "machine" and config_name == STOCK_CONFIG:
            specific.append(f"+{bare}={value}")
            if not any(other.startswith(f"{SEARCH_PATH}=") for other in arguments):
                specific.append(f"{SEARCH_PATH}=[pkg://tree_rl.verl_plugin.config]")
        elif bare.startswith("tree.") and sign:
            option = bare.removeprefix("tree.")
            engines = ENGINES[:1] if option in OF_THE_ACTOR_ALONE else ENGINES
            general += [line for place in engines for line in _option(place, option, value)]
        elif engine in ENGINES and option and sign:
            specific += _option(engine, option, value)
        else:
            specific.append(argument)
    return general + specific


def _option(engine: str, option: str, value: str) -> list[str]:
    return [f"++{engine}._target_={ENGINE_CONFIG}", f"++{engine}.tree.{option}={value}"]


def written_keys(arguments: Iterable[str]) -> list[str]:
    """The keys that the user wrote, without Hydra's prefixes."""
    return [argument.partition("=")[0].lstrip("+~") for argument in arguments]
