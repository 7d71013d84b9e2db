"""Prepares verl's config for the tree trainers before any worker starts, and checks it by the table of refusals."""

import logging

import torch
from omegaconf import DictConfig, OmegaConf, open_dict
from transformers import AutoConfig

from tree_rl.models.fused_layers import why_not_liger
from tree_rl.training.tree_options import AUTO
from tree_rl.verl_plugin.compat import need_critic
from tree_rl.verl_plugin.options import TREE_LANGUAGE_MODEL, TREE_VALUE_MODEL
from tree_rl.verl_plugin.refusals.job import refuse_job

logger = logging.getLogger(__name__)

TREE_MANAGER = "tree_rl.verl_plugin.agent_loops.prompt_forests.TreeAgentLoopManager"


def prepare_config(config: DictConfig, base_trainer_mode: str) -> None:
    """Set tree engines and the agent loop manager if the config names none, then refuse what trees cannot do.

    Args:
        config: verl's whole config, changed in place.
        base_trainer_mode: verl's mode of the tree trainer. verl would treat an unknown `trainer.v1.trainer_mode` as
            asynchronous.

    Raises:
        UnsupportedFeatureError: a setting that a tree run cannot honour; names its key and the remedy.
    """
    actor, critic = config.actor_rollout_ref.model, config.critic.model
    with open_dict(config):
        config.trainer.v1.trainer_mode = base_trainer_mode
        for node, model_type in ((actor, TREE_LANGUAGE_MODEL), (critic, TREE_VALUE_MODEL)):
            if node.get("model_type", None) is None:
                node.model_type = model_type
        _choose_layers(actor, OmegaConf.select(config, "actor_rollout_ref.actor.fsdp_config.full_determinism"))
        _choose_layers(critic, OmegaConf.select(config, "critic.fsdp.full_determinism"))
        agent = config.actor_rollout_ref.rollout.agent
        if agent.get("agent_loop_manager_class", None) is None:
            agent.agent_loop_manager_class = TREE_MANAGER
        if need_critic(config) and critic.model_type == TREE_VALUE_MODEL:
            _pass_on_critic_budget(config.critic)
    refuse_job(config, under_tree_trainer=True)


def _choose_layers(model: DictConfig, is_deterministic: bool | None) -> None:
    """Replace `use_liger=auto` by true or false: verl's servers of vLLM and SGLang take nothing else."""
    if model.get("use_liger", None) != AUTO:
        return
    path = model.get("hf_config_path", None) or model.path
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=bool(model.get("trust_remote_code", False)))
    except (OSError, ValueError) as error:
        reason: str | None = f"its config cannot be read here: {error}"
    else:
        reason = why_not_liger(config, device=torch.device("cuda"), deterministic=bool(is_deterministic))
    if reason is not None:
        logger.warning("model.use_liger=auto: %s keeps its own layers, as %s", path, reason)
    model.use_liger = reason is None


def _pass_on_critic_budget(critic: DictConfig) -> None:
    """Give a critic's engine the budget of a forward in `critic.*`, as verl does for the actor.

    verl's V1 trainers only pass `ppo_infer_max_token_len_per_gpu`, also for training.
    """
    train = critic.get("ppo_max_token_len_per_gpu", None)
    if critic.get("ppo_infer_max_token_len_per_gpu", None) is None and train is not None:
        critic.ppo_infer_max_token_len_per_gpu = train
    if not critic.get("use_dynamic_bsz", True):
        train_rows, infer_rows = critic.ppo_micro_batch_size_per_gpu, critic.get("ppo_infer_micro_batch_size_per_gpu")
        critic.fsdp.use_dynamic_bsz = False
        critic.fsdp.micro_batch_size_per_gpu = train_rows
        critic.fsdp.infer_micro_batch_size_per_gpu = infer_rows or train_rows
