"""Prepares verl's config for the tree trainers before any worker starts, and checks it by the table of refusals."""

from pathlib import Path

from omegaconf import DictConfig, open_dict

from tree_rl.verl_plugin.compat import need_critic
from tree_rl.verl_plugin.options import TREE_LANGUAGE_MODEL, TREE_VALUE_MODEL
from tree_rl.verl_plugin.refusals.job import refuse_job
from tree_rl.verl_plugin.refusals.table import TRAINER_MODES

TREE_MANAGER = "tree_rl.verl_plugin.agent_loops.prompt_forests.TreeAgentLoopManager"
TREE_ROUTER = Path(__file__).parents[1] / "config" / "tree_router.yaml"


def prepare_config(config: DictConfig) -> None:
    """Set tree engines, agent loop manager and router if the config names none, then refuse what trees cannot do.

    Names verl's mode for a tree trainer's, as verl would treat an unknown `trainer.v1.trainer_mode` as asynchronous.
    Raises an UnsupportedFeatureError that names the key of a setting that a tree run cannot honour, and the remedy.
    """
    actor, critic = config.actor_rollout_ref.model, config.critic.model
    with open_dict(config):
        mode = config.trainer.v1.trainer_mode
        config.trainer.v1.trainer_mode = TRAINER_MODES.get(mode, mode)
        # A shell completes a folder's name with a slash, in which verl finds no step, and leaves `~` behind an equals
        # sign to the program.
        if isinstance(path := config.trainer.get("resume_from_path", None), str):
            config.trainer.resume_from_path = str(Path(path).expanduser())
        for node, model_type in ((actor, TREE_LANGUAGE_MODEL), (critic, TREE_VALUE_MODEL)):
            if node.get("model_type", None) is None:
                node.model_type = model_type
        rollout, agent = config.actor_rollout_ref.rollout, config.actor_rollout_ref.rollout.agent
        if agent.get("agent_loop_manager_class", None) is None:
            agent.agent_loop_manager_class = TREE_MANAGER
        # verl does not make a router that the config names deterministic.
        if rollout.get("router_config_path", None) is None and not rollout.get("full_determinism", False):
            rollout.router_config_path = str(TREE_ROUTER)
        if need_critic(config) and critic.model_type == TREE_VALUE_MODEL:
            _pass_on_critic_budget(config.critic)
    refuse_job(config, under_tree_trainer=True)


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
