"""What stops a job on trees before Ray starts: words that are no choice, options that trees refuse, missing files."""

import copy
import os
from collections.abc import Iterator, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config

from tree_rl.verl_plugin.launch.compose import CommandLineError, one_line
from tree_rl.verl_plugin.launch.did_you_mean import did_you_mean
from tree_rl.verl_plugin.launch.tree_arguments import ENGINES, written_keys

MODEL_TYPES = ("tree_language_model", "tree_value_model", "language_model", "value_model")
TRAINER_MODES = {f"tree_{mode}": mode for mode in ("sync", "colocate_async", "separate_async")}
CHOICES = {
    "actor_rollout_ref.model.model_type": ("tree_language_model", "language_model"),
    "critic.model.model_type": ("tree_value_model", "value_model"),
    "trainer.v1.trainer_mode": (*TRAINER_MODES, *TRAINER_MODES.values()),
    "actor_rollout_ref.rollout.name": ("hf", "vllm", "sglang", "trtllm"),
    "actor_rollout_ref.actor.strategy": ("fsdp2", "fsdp"),
    "critic.strategy": ("fsdp2", "fsdp"),
}
"""Config key -> its values; others may be of another plugin, and are refused where they look like one of these."""
COUNTS = (
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.actor.ppo_epochs",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "trainer.n_gpus_per_node",
    "trainer.nnodes",
    "trainer.total_epochs",
)
"""Keys of whole numbers of at least 1."""
RATES = ("actor_rollout_ref.actor.optim.lr", "critic.optim.lr")
FILES = ("data.train_files", "data.val_files", "reward.custom_reward_function.path")
"""Keys of a path or a list of paths on this machine."""


def check_words(given: Sequence[str], machines: Sequence[str]) -> None:
    """Check values that choose a config file, which Hydra would look for in vain.

    Raises:
        CommandLineError: `machine` is none of them.
    """
    for argument in given:
        key, _, value = argument.partition("=")
        if key.lstrip("+") == "machine" and value not in machines:
            raise CommandLineError(
                f"{key.lstrip('+')}={value}: expected one of {', '.join(machines)}{did_you_mean(value, machines)}"
            )


def check_job(config: DictConfig, given: Sequence[str]) -> None:
    """Check a composed config as a tree run would, then as verl does, then the files it names.

    Raises:
        CommandLineError: the first mistake; names its key.
    """
    try:
        _check_choices(config)
        _check_tree_blocks(config, given)
        _check_numbers(config)
        _check_prepared(copy.deepcopy(config))
        if config.trainer.nnodes == 1 and "RAY_ADDRESS" not in os.environ:
            _check_files(config)
        validate_config(config, need_reference_policy(config), need_critic(config))
    except CommandLineError:
        raise
    except (ValueError, TypeError, AssertionError, OmegaConfBaseException) as error:
        raise CommandLineError(one_line(error)) from error
    except Exception as error:  # noqa: BLE001 - Hydra wraps what dataclasses raise in an exception of its own.
        raise CommandLineError(one_line(error)) from error


def _check_choices(config: DictConfig) -> None:
    for key, choices in CHOICES.items():
        value = OmegaConf.select(config, key, default=None)
        if value is None or value in choices:
            continue
        hint = did_you_mean(str(value), choices, cutoff=0.6)
        if key.endswith(".strategy"):
            raise CommandLineError(f"{key}={value}: trees run on FSDP2; set {key}=fsdp2{hint}")
        if hint or key != "actor_rollout_ref.rollout.name" or str(value).startswith("tree"):
            raise CommandLineError(f"{key}={value}: expected one of {', '.join(choices)}{hint}")
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY

    for key, registered in (
        ("algorithm.adv_estimator", [*map(str, ADV_ESTIMATOR_REGISTRY)]),
        ("actor_rollout_ref.actor.policy_loss.loss_mode", [*POLICY_LOSS_REGISTRY]),
    ):
        value = str(OmegaConf.select(config, key, default=""))
        hint = did_you_mean(value, registered, cutoff=0.6)
        # What is not registered here may come with a module that verl loads in its workers.
        if value and value not in registered and hint:
            raise CommandLineError(f"{key}={value}: not registered{hint}")


def _check_tree_blocks(config: DictConfig, given: Sequence[str]) -> None:
    from tree_rl.verl_plugin.options import as_tree_config

    short = written_keys(given)
    for engine in ENGINES:
        block = OmegaConf.select(config, f"{engine}.tree", default=None)
        if block is None:
            continue
        try:
            as_tree_config(OmegaConf.to_container(block, resolve=True))
        except ValueError as error:
            message = one_line(error)
            key = message.partition("=")[0].partition(":")[0]
            if key in short:
                raise CommandLineError(message) from error
            raise CommandLineError(message.replace("tree.", f"{engine}.tree.", 1)) from error


def _check_numbers(config: DictConfig) -> None:
    for key in COUNTS:
        value = OmegaConf.select(config, key, default=None)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise CommandLineError(f"{key}={value}: expected a whole number of at least 1")
    for key in RATES:
        value = OmegaConf.select(config, key, default=None)
        # YAML reads 1e-6 as a text; Hydra's own grammar as a number.
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0):
            raise CommandLineError(f"{key}={value}: expected a number of at least 0")


def _check_prepared(config: DictConfig) -> None:
    """What the tree trainers refuse, or, of verl's own trainers, what the tree engines do."""
    from tree_rl.verl_plugin.engine.features import refuse_engine_options, refuse_model_options
    from tree_rl.verl_plugin.trainer.prepared_config import prepare_config

    base = TRAINER_MODES.get(config.trainer.v1.trainer_mode)
    if base is not None:
        prepare_config(config, base)
        return
    roles = (
        ("actor_rollout_ref.model", "actor_rollout_ref.actor", ENGINES[0], False),
        ("critic.model", "critic", ENGINES[2], True),
    )
    for model, role, engine, is_value in roles:
        options = OmegaConf.select(config, model)
        if not str(options.get("model_type", "")).startswith("tree") or (is_value and not need_critic(config)):
            continue
        strategy = OmegaConf.select(config, f"{role}.strategy")
        if strategy != "fsdp2":
            raise CommandLineError(f"{role}.strategy={strategy}: trees run on FSDP2; set {role}.strategy=fsdp2")
        refuse_model_options(options, is_value=is_value, key=model)
        refuse_engine_options(OmegaConf.select(config, engine), is_value=is_value, key=engine)


def _check_files(config: DictConfig) -> None:
    for key in FILES:
        for path in _paths(OmegaConf.select(config, key, default=None)):
            if "://" not in path and not os.path.exists(os.path.expanduser(path)):
                raise CommandLineError(f"{key}={path}: no such file on this machine")
    roles = ["actor_rollout_ref.model", *(["critic.model"] if need_critic(config) else [])]
    for key in (f"{role}.{name}" for role in roles for name in ("path", "tokenizer_path")):
        path = OmegaConf.select(config, key, default=None)
        looks_local = path is not None and (path.startswith(("/", ".", "~")) or path.count("/") > 1)
        if path is not None and looks_local and "://" not in path and not os.path.exists(os.path.expanduser(path)):
            raise CommandLineError(f"{key}={path}: no such folder on this machine")


def _paths(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif value is not None:
        yield from (str(entry) for entry in value)
