"""What stops a job on trees before Ray starts: words that are no choice, options that trees refuse, missing files."""

import copy
import os
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tree_rl.verl_plugin.agent_loops.agent_loop_options import agent_class, read_gateway_options
from tree_rl.verl_plugin.agent_loops.tool_agent_loop import as_gateway_agent
from tree_rl.verl_plugin.compat import (
    ADV_ESTIMATOR_REGISTRY,
    POLICY_LOSS_REGISTRY,
    Tracking,
    _agent_loop_registry,
    need_critic,
    need_reference_policy,
    validate_config,
)
from tree_rl.verl_plugin.did_you_mean import did_you_mean, nearest_key
from tree_rl.verl_plugin.engine.features import refuse_engine_options, refuse_model_options
from tree_rl.verl_plugin.engine.role_options import refuse_batches_to_come, refuse_job_options
from tree_rl.verl_plugin.launch.compose import CommandLineError, keys_of, one_line, trains_trees
from tree_rl.verl_plugin.launch.model_check import refuse_model_of_job, refuse_rows_with_images
from tree_rl.verl_plugin.launch.tree_arguments import ENGINES, written_keys
from tree_rl.verl_plugin.options import as_tree_config
from tree_rl.verl_plugin.trainer.old_log_probs.reuse import LogProbReuse
from tree_rl.verl_plugin.trainer.prepared_config import prepare_config

TRAINER_MODES = {f"tree_{mode}": mode for mode in ("sync", "colocate_async", "separate_async")}
CHOICES = {
    "actor_rollout_ref.model.model_type": ("tree_language_model", "language_model"),
    "critic.model.model_type": ("tree_value_model", "value_model"),
    "trainer.v1.trainer_mode": (*TRAINER_MODES, *TRAINER_MODES.values()),
}
"""Config key -> all of its values in a job on trees."""
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
SOFT_CHOICES = {
    "actor_rollout_ref.rollout.name": ("hf", "vllm", "sglang", "trtllm"),
    "actor_rollout_ref.rollout.dtype": ("bfloat16", "float16", "float32", "half", "float", "auto"),
    "actor_rollout_ref.actor.fsdp_config.model_dtype": ("fp32", "bf16", "fp16", "float32", "bfloat16", "float16"),
    "actor_rollout_ref.actor.loss_agg_mode": (
        *("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"),
    ),
    "actor_rollout_ref.actor.kl_loss_type": ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "full"),
    "actor_rollout_ref.rollout.mode": ("async",),
    "data.truncation": ("error", "left", "right", "middle"),
    "trainer.resume_mode": ("auto", "disable", "resume_path"),
    "trainer.device": ("cpu", "cuda", "npu"),
}
"""Config key -> values that verl 0.9.1 knows; another plugin may add some, so only a near miss of one is refused."""
RATES = ("actor_rollout_ref.actor.optim.lr", "critic.optim.lr")
FILES = (
    "data.train_files",
    "data.val_files",
    "data.custom_cls.path",
    "reward.custom_reward_function.path",
    "custom_reward_function.path",
    "actor_rollout_ref.rollout.multi_turn.tool_config_path",
    "actor_rollout_ref.rollout.multi_turn.function_tool_path",
    # By default the data's are those of the rollout.
    "data.tool_config_path",
    "data.function_tool_path",
    "actor_rollout_ref.rollout.agent.agent_loop_config_path",
    "actor_rollout_ref.model.lora_adapter_path",
)
"""Keys of a path or a list of paths on this machine."""
CUSTOM = "actor_rollout_ref.rollout.custom"


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


def path_that_ray_splits(path: str) -> bool:
    """Whether Ray, which starts workers through a shell without quoting the interpreter, would run another program."""
    return re.search(r"[\s'\"\\$&;|<>()*?\[\]{}!#`]", path) is not None


def check_job(config: DictConfig, stock: DictConfig, given: Sequence[str]) -> None:
    """Check a composed config: its words and numbers, as a tree run would, the files it names, then as verl does.

    Args:
        config: complete.
        stock: the same without the user's overrides.
        given: the user's overrides.

    Raises:
        CommandLineError: the first mistake; names its key.
    """
    try:
        check_kinds(config, stock, given)
        _check_choices(config)
        _check_trains_trees(config, given)
        _check_tree_blocks(config, given)
        _check_numbers(config)
        prepared = copy.deepcopy(config)
        _check_prepared(prepared)
        if _runs_here(config):
            _check_interpreter()
            missing_files(
                config, FILES, ["actor_rollout_ref.model", *(["critic.model"] if need_critic(config) else [])]
            )
        if trains_trees(config):
            _check_models(prepared)
            refuse_rows_with_images(config.data, ("train_files", "val_files"))
        validate_config(config, need_reference_policy(config), need_critic(config))
    except CommandLineError:
        raise
    except (ValueError, TypeError, AssertionError, OSError, OmegaConfBaseException, HydraException) as error:
        message = one_line(error)
        unknown = message.partition("unexpected keyword argument ")[2].strip("'")
        for key in written_keys(given):
            if unknown and key.rpartition(".")[2] == unknown:
                raise CommandLineError(f"{key}: no such key{nearest_key(key, keys_of(stock))}") from error
        raise CommandLineError(message) from error


def _runs_here(config: DictConfig) -> bool:
    """Whether all workers run on this machine."""
    return bool(config.trainer.nnodes == 1 and "RAY_ADDRESS" not in os.environ)


def _check_interpreter() -> None:
    if path_that_ray_splits(sys.executable):
        raise CommandLineError(
            f"{sys.executable}: Ray cannot start workers of an environment whose path has spaces or quotes; create it "
            "in a folder without them"
        )


def _check_choices(config: DictConfig) -> None:
    for key, choices in CHOICES.items():
        value = OmegaConf.select(config, key, default=None)
        if value is None or value in choices:
            continue
        hint = did_you_mean(str(value), choices, cutoff=0.6)
        raise CommandLineError(f"{key}={value}: expected one of {', '.join(choices)}{hint}")
    soft = SOFT_CHOICES | {
        "algorithm.adv_estimator": tuple(map(str, ADV_ESTIMATOR_REGISTRY)),
        "actor_rollout_ref.actor.policy_loss.loss_mode": tuple(POLICY_LOSS_REGISTRY),
        "trainer.logger": tuple(Tracking.supported_backend),
    }
    for key, choices in soft.items():
        value = OmegaConf.select(config, key, default=None)
        for entry in _texts(value):
            hint = did_you_mean(entry, choices, cutoff=0.6)
            if entry not in choices and hint:
                raise CommandLineError(f"{key}={entry}: no such choice{hint}")
    if config.trainer.get("use_v1", True) is not True:
        raise CommandLineError(
            f"trainer.use_v1={config.trainer.use_v1}: verl's older trainer builds no trees; set it to true"
        )


def check_kinds(config: DictConfig, stock: DictConfig, given: Sequence[str]) -> None:
    """Refuse a text where the config without the user's arguments has a number or a truth value."""
    for key in written_keys(given):
        before, now = (OmegaConf.select(each, key, default=None) for each in (stock, config))
        if isinstance(before, bool | int | float) and isinstance(now, str):
            expected = "true or false" if isinstance(before, bool) else "a number"
            raise CommandLineError(f"{key}={now}: expected {expected}")


def _check_trains_trees(config: DictConfig, given: Sequence[str]) -> None:
    for key in written_keys(given):
        if (key.startswith("tree.") or ".tree." in key) and not trains_trees(config):
            raise CommandLineError(f"{key}: no engine of this job runs trees; add trainer.v1.trainer_mode=tree_sync")


def _check_tree_blocks(config: DictConfig, given: Sequence[str]) -> None:
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
    steps = config.trainer.get("total_training_steps", None)
    if steps is not None and (not isinstance(steps, int) or steps < 1):
        raise CommandLineError(f"trainer.total_training_steps={steps}: expected a whole number of at least 1, or null")
    for key in RATES:
        value = OmegaConf.select(config, key, default=None)
        # YAML reads 1e-6 as a text; Hydra's own grammar as a number.
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0):
            raise CommandLineError(f"{key}={value}: expected a number of at least 0")


def _check_prepared(config: DictConfig) -> None:
    """What the tree trainers refuse, or, of verl's own trainers, what the tree engines do."""
    _check_groups_of_ranks(config)
    base = TRAINER_MODES.get(config.trainer.v1.trainer_mode)
    _check_agent_loops(config)
    if base is not None:
        prepare_config(config, base)
        LogProbReuse.of(config)
        return
    refuse_job_options(config)
    reuse = f"{ENGINES[0]}.tree.reuse_log_probs"
    if OmegaConf.select(config, reuse, default=None) is True:
        raise CommandLineError(
            f"{reuse}=True: verl's own trainer finds old log-probs by a pass; set trainer.v1.trainer_mode=tree_sync, "
            "or the first to auto"
        )
    for model, role, engine, is_value in _tree_roles(config):
        options = OmegaConf.select(config, model)
        strategy = OmegaConf.select(config, f"{role}.strategy")
        if strategy != "fsdp2":
            raise CommandLineError(f"{role}.strategy={strategy}: trees run on FSDP2; set {role}.strategy=fsdp2")
        if not is_value:
            refuse_batches_to_come(config)
        refuse_model_options(options, is_value=is_value, key=model)
        refuse_engine_options(OmegaConf.select(config, engine), is_value=is_value, key=engine)


def _tree_roles(config: DictConfig) -> Iterator[tuple[str, str, str, bool]]:
    """Keys of the model, the role and the engine of each role that trains on trees, and whether it is a critic."""
    roles = (
        ("actor_rollout_ref.model", "actor_rollout_ref.actor", ENGINES[0], False),
        ("critic.model", "critic", ENGINES[2], True),
    )
    for role in roles:
        runs_trees = str(OmegaConf.select(config, f"{role[0]}.model_type", default="")).startswith("tree")
        if runs_trees and (not role[3] or need_critic(config)):
            yield role


def _check_models(config: DictConfig) -> None:
    """What the models of a prepared config say, built without weights."""
    for model, _, engine, is_value in _tree_roles(config):
        keys = [engine, *(ENGINES[1:2] if not is_value and need_reference_policy(config) else [])]
        refuse_model_of_job(
            OmegaConf.select(config, model),
            key=model,
            engines={key: OmegaConf.select(config, key) for key in keys},
            is_value=is_value,
            rollout=None if is_value else OmegaConf.select(config, "actor_rollout_ref.rollout.name"),
        )


def _check_groups_of_ranks(config: DictConfig) -> None:
    """Sizes of groups of ranks, which verl would round down, divide the number of ranks."""
    ranks = config.trainer.n_gpus_per_node * config.trainer.nnodes
    for engine in [*ENGINES[:2], *(ENGINES[2:] if need_critic(config) else [])]:
        key = f"{engine}.ulysses_sequence_parallel_size"
        size = OmegaConf.select(config, key, default=1)
        if not isinstance(size, int) or size < 1 or ranks % size:
            raise CommandLineError(f"{key}={size} on {ranks} ranks: expected a divisor of their number")
        sharded = OmegaConf.select(config, f"{engine}.fsdp_size", default=-1)
        if isinstance(sharded, int) and 0 < sharded < ranks and ranks % sharded:
            raise CommandLineError(
                f"{engine}.fsdp_size={sharded} on {ranks} ranks: expected a divisor of their number, or -1 for all"
            )


def _check_agent_loops(config: DictConfig) -> None:
    """The default agent loop, and options of this package's, which each session would refuse again."""
    rollout = config.actor_rollout_ref.rollout
    _check_default_loop(rollout.agent)
    custom = rollout.get("custom", None) or {}
    blocks = {name: custom.get(name, None) for name in ("gateway_agent", "tree_agent")}
    given = {
        name: OmegaConf.to_container(block, resolve=True)
        for name, block in blocks.items()
        if block is not None and (name == "tree_agent" or block.get("agent", None))
    }
    lengths = {"max_context_tokens": rollout.prompt_length + rollout.response_length}
    lengths["max_turn_tokens"] = rollout.response_length
    for name, options in given.items():
        wanted = as_gateway_agent(options) if name == "tree_agent" else options
        read, _ = read_gateway_options(wanted, **lengths, template_options={})
        if _runs_here(config):
            try:
                agent_class(read.agent)
            except (ImportError, AttributeError) as error:
                raise CommandLineError(
                    f"{CUSTOM}.{name}.agent={read.agent}: {one_line(error)}; correct it, or PYTHONPATH"
                ) from error


def _check_default_loop(agent: DictConfig) -> None:
    """Rows may name loops of their own, so only a near miss is refused."""
    known, path = set(_agent_loop_registry), agent.get("agent_loop_config_path", None)
    if path is not None and os.path.exists(os.path.expanduser(path)):
        known |= {str(entry.get("name", "")) for entry in OmegaConf.load(os.path.expanduser(path))}
    wanted = agent.get("default_agent_loop", None)
    hint = "" if wanted in known or wanted is None else did_you_mean(str(wanted), sorted(known), cutoff=0.6)
    if hint:
        raise CommandLineError(f"actor_rollout_ref.rollout.agent.default_agent_loop={wanted}: no such agent loop{hint}")


def missing_files(config: DictConfig, files: Sequence[str], roles: Sequence[str]) -> None:
    """Refuse paths that are not on this machine.

    Args:
        config: complete.
        files: keys of a path or a list of paths.
        roles: keys of models, whose path may also be a name on a hub.

    Raises:
        CommandLineError: names the first key and path.
    """
    for key in files:
        for path in _texts(OmegaConf.select(config, key, default=None)):
            if "://" not in path and not any(map(os.path.exists, (os.path.expanduser(path), _beside_verl(path)))):
                raise CommandLineError(f"{key}={path}: no such file on this machine")
    for key in (f"{role}.{name}" for role in roles for name in ("path", "tokenizer_path")):
        path = OmegaConf.select(config, key, default=None)
        looks_local = path is not None and (path.startswith(("/", ".", "~")) or path.count("/") > 1)
        if path is not None and looks_local and "://" not in path and not os.path.exists(os.path.expanduser(path)):
            raise CommandLineError(f"{key}={path}: no such folder on this machine")


def _beside_verl(path: str) -> str:
    """Where verl also looks for configs."""
    package = find_spec("verl")
    assert package is not None and package.origin is not None
    return os.path.join(os.path.dirname(os.path.dirname(package.origin)), path)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | ListConfig):
        yield from (str(entry) for entry in value)
