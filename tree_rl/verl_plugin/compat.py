"""All names of verl and TransferQueue that are no documented extension points, and the supported versions.

Names are imported on first use, so that a process imports only the parts of verl it needs. Other modules import the
plug points of verl's extension guide directly and everything else from here; one contract test checks that.
"""

import importlib
from importlib.metadata import version
from typing import Any

from packaging.specifiers import SpecifierSet

SUPPORTED_VERL = SpecifierSet(">=0.9.1,<0.10")

NAMES_OF_MODULE = {
    # Engines.
    "verl.workers.engine.base": "EngineRegistry",
    "verl.workers.engine.fsdp.transformer_impl": "FSDPEngineWithLMHead FSDPEngineWithValueHead",
    "verl.trainer.distillation.losses": "distillation_ppo_loss",
    "verl.trainer.distillation.fsdp.losses": "kl_divergence",
    "verl.workers.utils.losses": "ppo_loss sft_loss value_loss",
    "verl.utils.metric": "Metric AggregationType",
    "verl.utils.py_functional": "append_to_dict",
    "verl.workers.config.optimizer": "build_optimizer",
    "verl.utils.torch_dtypes": "PrecisionType",
    "verl.utils.fsdp_utils": "get_init_weight_context_manager",
    "verl.utils.device": "get_device_id get_device_name",
    # Workers.
    "verl.workers.engine_workers": "ActorRolloutRefWorker TrainingWorker",
    "verl.experimental.separation.engine_workers": "DetachActorWorker",
    # Trainers.
    "verl.trainer.ppo.v1.trainer_base": "PPOTrainer TRAINER_REGISTRY",
    "verl.trainer.ppo.v1.trainer_colocate_async": "PPOTrainerColocateAsync",
    "verl.trainer.ppo.v1.trainer_separate_async": "PPOTrainerSeparateAsync",
    "verl.trainer.ppo.v1.trainer_sync": "PPOTrainerSync",
    "verl.trainer.ppo.v1.replay_buffer": "ReplayBuffer ReplayBufferAsync",
    "verl.trainer.ppo.utils": "Role need_critic need_reference_policy",
    "verl.utils.config": "validate_config omega_conf_to_dataclass",
    "verl.trainer.ppo.checkpoint_callback": "CheckpointCallback",
    "verl.utils.tracking": "Tracking",
    "verl.trainer.ppo.core_algos": "ADV_ESTIMATOR_REGISTRY POLICY_LOSS_REGISTRY agg_loss get_adv_estimator_fn",
    "verl.trainer.ppo.ray_trainer": "apply_kl_penalty compute_advantage",
    "verl.experimental.reward_loop.reward_manager": "get_reward_manager_cls",
    "verl.trainer.ppo.rollout_corr_helper": "compute_rollout_correction_and_add_to_batch",
    "verl.utils.debug.metrics": "calculate_debug_metrics",
    "verl.utils.seqlen_balancing": "log_seqlen_unbalance",
    "verl.utils.torch_functional": "masked_whiten",
    "verl.workers.utils.padding": "response_from_nested response_to_nested",
    "verl.trainer.ppo.padding_utils": "upsample_batch_to_divisible_size",
    "transfer_queue": "KVBatchMeta",
    # The actors that store the rows; set in the process that started them.
    "transfer_queue.interface": "_TQ_STORAGE",
    # Supervised fine-tuning.
    "verl.trainer.sft_trainer": "SFTTrainer",
    "verl.utils.distributed": "destroy_global_process_group initialize_global_process_group",
    # Rollout side.
    "verl.workers.rollout.base": "_ROLLOUT_REGISTRY",
    "verl.workers.rollout.router": "GlobalRequestLoadBalancer",
    "verl.trainer.ppo.v1.agent_loop_tq": "AgentLoopManagerTQ AgentLoopWorkerTQ apply_greedy_sampling_params",
    "verl.experimental.agent_loop.agent_loop": "_agent_loop_registry",
    "verl.utils.model": "get_hf_auto_model_class update_model_config",
    "verl.utils.tokenizer": "build_multimodal_processor_inputs get_processor_token_id",
}
"""Private and semi-public names by module."""
PRIVATE_NAMES = {name: module for module, names in NAMES_OF_MODULE.items() for name in names.split()}

PRIVATE_MODULES: dict[str, str] = {
    "constants_ppo": "verl.trainer.constants_ppo",
    "main_ppo": "verl.trainer.main_ppo",
    "tensordict_utils": "verl.utils.tensordict_utils",
    "torch_functional": "verl.utils.torch_functional",
    "transformer_impl": "verl.workers.engine.fsdp.transformer_impl",
    "transfer_queue": "transfer_queue",
}
"""Import paths of modules of which we call several functions."""


def check_verl_version() -> str:
    """Return the installed verl version; raise an ImportError if it is outside the supported range."""
    installed = version("verl")
    if not SUPPORTED_VERL.contains(installed, prereleases=True):
        raise ImportError(
            f"tree_rl supports verl {SUPPORTED_VERL}, found verl {installed}; install a supported version "
            "(pip install 'verl>=0.9.1,<0.10') or set VERL_USE_EXTERNAL_PLUGINS=none to run verl without trees"
        )
    return installed


def import_statement(name: str) -> str:
    """Code that imports a private name, for a process that must not import tree_rl."""
    return f"from {PRIVATE_NAMES[name]} import {name}"


def __getattr__(name: str) -> Any:
    if name in PRIVATE_MODULES:
        return importlib.import_module(PRIVATE_MODULES[name])
    if name not in PRIVATE_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(PRIVATE_NAMES[name]), name)
