"""Completes and checks a reinforcement learning job before Ray starts, then runs it with verl's `main_ppo`.

`python -m tree_rl.train` calls this with a command line, verl's main with the config that Hydra composed.
"""

import contextlib
import copy
import io
import os
import re
import sys
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from tree_rl import __version__
from tree_rl.models.sequence_parallel_support import KEY as SEQUENCE_PARALLEL
from tree_rl.verl_plugin import compat
from tree_rl.verl_plugin.agent_loops.agent_loop_options import agent_class, read_gateway_options
from tree_rl.verl_plugin.agent_loops.tool_agent_loop import as_gateway_agent
from tree_rl.verl_plugin.did_you_mean import nearest_key
from tree_rl.verl_plugin.embedded_rollout.hf_options import HFRolloutOptions
from tree_rl.verl_plugin.launch import command_line, model_check
from tree_rl.verl_plugin.launch.asked_for_trees import trains_trees
from tree_rl.verl_plugin.launch.short_forms import STOCK_CONFIG, CommandLineError, expand, written_keys
from tree_rl.verl_plugin.options import ENGINES
from tree_rl.verl_plugin.refusals.job import refuse_job, refuse_ranks, tree_roles
from tree_rl.verl_plugin.refusals.refusal import Of, option
from tree_rl.verl_plugin.refusals.table import TRAINER_MODES, refuse_if_unsupported
from tree_rl.verl_plugin.trainer.old_log_probs import LogProbReuse
from tree_rl.verl_plugin.trainer.prepared_config import prepare_config

_VERL = find_spec("verl")
assert _VERL is not None and _VERL.origin is not None
PROGRAM = command_line.Program(
    name="tree_rl.train",
    folder=Path(_VERL.origin).parent / "trainer",
    config_name=STOCK_CONFIG,
    expand=expand,
)
ENGINE_CONFIG = "tree_rl.verl_plugin.options.TreeFSDPEngineConfig"
ROLES = ("actor_rollout_ref.actor", "critic")
"""Roles whose strategy a user sets; the reference policy has the actor's."""
CUSTOM = "actor_rollout_ref.rollout.custom"


def main(arguments: Sequence[str]) -> None:
    """Run a command line of verl's `main_ppo`; if it cannot run, print one line and exit with code 2."""
    with command_line.refusals_as_one_line():
        config, given = command_line.read_job(arguments, PROGRAM)
    make_ready(config, given)
    compat.main_ppo.main(config)


def make_ready(config: DictConfig, given: Sequence[str]) -> None:
    """Complete a job on trees in place, check it and print its banner; does not change a job without trees.

    If the job cannot run, prints one line on standard error and exits with code 2.
    """
    with command_line.refusals_as_one_line():
        banner = checked(config, given)
    if banner:
        print(banner, file=sys.stderr, flush=True)


def make_ready_for_main_ppo(config: DictConfig, hydra: Any) -> None:
    """As `make_ready`, for verl's main; also checks the types of values in the config, which Hydra does not."""
    with command_line.refusals_as_one_line():
        command_line.compose_checked(hydra.job.config_name, [*hydra.overrides.hydra, *hydra.overrides.task])
    make_ready(config, hydra.overrides.task)


def checked(config: DictConfig, given: Sequence[str]) -> str:
    """Complete and check a job; return its banner, which is empty for a job without trees.

    Raises a ValueError that names the key if the job uses trees and cannot run.
    """
    written = written_keys(given)
    if not trains_trees(config):
        asked = [key for key in written if f"{key}.".startswith(("tree.", *(f"{engine}.tree." for engine in ENGINES)))]
        if asked:
            raise CommandLineError(
                f"{asked[0]}: no engine of this job runs trees; add trainer.v1.trainer_mode=tree_sync"
            )
        return ""
    # Silenced, because verl will repeat these checks and their warnings.
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        notes = complete(config, written)
        _check(config, written)
    return _banner(config, notes)


def complete(config: DictConfig, written: Sequence[str]) -> list[str]:
    """Set FSDP2, the class of the `tree` block, `use_liger` and `load_format` in `config` where the user has left them
    open; return notes for the banner."""
    roles = ["actor_rollout_ref", *(["critic"] if compat.need_critic(config) else [])]
    notes = [note for role in roles if (note := model_check.choose_layers(config, role))]
    notes += [note] if (note := model_check.load_before_images(config)) else []
    for key in (f"{role}.strategy" for role in ROLES):
        if key not in written and OmegaConf.select(config, key, default=None) == "fsdp":
            OmegaConf.update(config, key, "fsdp2")
            if key.partition(".")[0] in roles:
                notes.append(f"{key}=fsdp2 in place of verl's default fsdp")
    for engine in ENGINES:
        node = OmegaConf.select(config, engine, default=None)
        if node is not None and "tree" in node:
            OmegaConf.update(config, f"{engine}._target_", ENGINE_CONFIG, force_add=True)
    if config.trainer.get("balance_batch", True) is not True:
        notes.append(
            f"trainer.balance_batch={config.trainer.balance_batch} has no effect: verl's V1 trainers do not read it, "
            "and give ranks about equal work"
        )
    return notes


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
    """The budget of a role's forward if `tree.max_tokens` is not set."""
    if role.get("use_dynamic_bsz", False):
        return str(role.get("ppo_max_token_len_per_gpu", None))
    rows = role.get("ppo_micro_batch_size_per_gpu", None) or 1
    return f"of {rows} longest rows (ppo_micro_batch_size_per_gpu, as use_dynamic_bsz=False)"


def _check(config: DictConfig, written: Sequence[str]) -> None:
    """Check a completed config: values, tree options, files, models, data, and finally verl's checks."""
    refuse_if_unsupported(config, "", Of.VALUES)
    for engine in ENGINES:
        command_line.check_tree_block(OmegaConf.select(config, engine, default=None), engine, written)
    if _runs_here(config):
        if path_that_ray_splits(sys.executable):
            raise CommandLineError(
                f"{sys.executable}: Ray cannot start workers of an environment whose path has spaces or quotes; create "
                "it in a folder without them"
            )
        refuse_if_unsupported(config, "", Of.FILES)
        for key in ("actor_rollout_ref.model", *(["critic.model"] if compat.need_critic(config) else [])):
            refuse_if_unsupported(OmegaConf.select(config, key), key, Of.MODEL_FILES)
        refuse_if_unsupported(config, "", Of.MACHINE)
    prepared = copy.deepcopy(config)
    _check_prepared(prepared)
    _check_models(prepared)
    if config.actor_rollout_ref.rollout.name == "hf":
        HFRolloutOptions.from_rollout(config.actor_rollout_ref.rollout)
    model_check.refuse_rows_with_images(config.data, why=model_check.why_no_images(config))
    try:
        compat.validate_config(config, compat.need_reference_policy(config), compat.need_critic(config))
    except (TypeError, HydraException) as error:
        unknown = command_line.one_line(error).partition("unexpected keyword argument ")[2].strip("'")
        for key in written:
            if unknown and key.rpartition(".")[2] == unknown:
                hint = nearest_key(key, command_line.keys_of(config) - {key})
                raise CommandLineError(f"{key}: no such key{hint}") from error
        raise


def path_that_ray_splits(path: str) -> bool:
    """True if Ray, which passes the interpreter to a shell without quotes, cannot start workers with this path."""
    return re.search(r"[\s'\"\\$&;|<>()*?\[\]{}!#`]", path) is not None


def _runs_here(config: DictConfig) -> bool:
    """True if Ray will start on this machine alone, and not join a cluster, whose head may lack GPUs and files."""
    # As Ray searches for a cluster that `ray start` has started.
    started = Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp") / "ray/ray_current_cluster"
    address = option(config, "ray_kwargs.ray_init.address") or os.environ.get("RAY_ADDRESS")
    starts = address == "local" or not (address or started.exists())
    return bool(config.trainer.nnodes == 1 and starts)


def _check_prepared(config: DictConfig) -> None:
    """Ask the refusals of the tree trainers or, under verl's trainers, those of the tree engines."""
    ranks = config.trainer.n_gpus_per_node * config.trainer.nnodes
    # verl also takes an engine's size of sequence parallelism from the role.
    roles = ("actor_rollout_ref.actor", "actor_rollout_ref.ref")
    for key in [*roles, *ENGINES[:2], *(ENGINES[2:] if compat.need_critic(config) else [])]:
        refuse_ranks(OmegaConf.select(config, key) or {}, key, ranks)
    _check_agent_loops(config)
    if config.trainer.v1.trainer_mode not in TRAINER_MODES:
        refuse_job(config, under_tree_trainer=False)
        return
    prepare_config(config)
    LogProbReuse.of(config)


def _check_models(config: DictConfig) -> None:
    """Check the models of a prepared config, built without weights."""
    roles = list(tree_roles(config))
    for key in dict.fromkeys(role.model for role in roles):
        own = [role for role in roles if role.model == key]
        model_check.refuse_model_of_job(
            OmegaConf.select(config, key),
            key=key,
            engines={
                **{role.engine: OmegaConf.select(config, role.engine) for role in own},
                **{role.key: {SEQUENCE_PARALLEL: option(config, f"{role.key}.{SEQUENCE_PARALLEL}", 1)} for role in own},
            },
            is_value=own[0].is_critic,
            rollout=None if own[0].is_critic else OmegaConf.select(config, "actor_rollout_ref.rollout.name"),
        )


def _check_agent_loops(config: DictConfig) -> None:
    """Check the options of our agent loops, which otherwise only sessions check."""
    rollout = config.actor_rollout_ref.rollout
    custom: Any = OmegaConf.to_container(rollout.get("custom", None) or OmegaConf.create(), resolve=True)
    given = {name: custom[name] for name in ("gateway_agent",) if (custom.get(name) or {}).get("agent")}
    if custom.get("tree_agent") is not None:
        given["tree_agent"] = as_gateway_agent(custom["tree_agent"])
    lengths = {"max_context_tokens": rollout.prompt_length + rollout.response_length}
    lengths["max_turn_tokens"] = rollout.response_length
    for name, options in given.items():
        read, _ = read_gateway_options(options, **lengths, template_options={})
        if _runs_here(config):
            try:
                agent_class(read.agent)
            except (ImportError, AttributeError) as error:
                raise CommandLineError(
                    f"{CUSTOM}.{name}.agent={read.agent}: {command_line.one_line(error)}; correct it, or PYTHONPATH"
                ) from error
