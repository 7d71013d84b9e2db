"""All names of verl and TransferQueue that are no documented extension points, and the supported versions.

Names are imported on first use, so that a process imports only the parts of verl it needs. Other modules import the
plug points of verl's extension guide directly and everything else from here; one contract test checks that.
"""

import importlib
from importlib.metadata import version
from typing import Any

from packaging.specifiers import SpecifierSet

SUPPORTED_VERL = SpecifierSet(">=0.9.1,<0.10")

PRIVATE_NAMES: dict[str, str] = {
    # Engines.
    "BaseEngine": "verl.workers.engine.base",
    "EngineRegistry": "verl.workers.engine.base",
    "FSDPEngineWithLMHead": "verl.workers.engine.fsdp.transformer_impl",
    "FSDPEngineWithValueHead": "verl.workers.engine.fsdp.transformer_impl",
    "distillation_ppo_loss": "verl.trainer.distillation.losses",
    "kl_divergence": "verl.trainer.distillation.fsdp.losses",
    "ppo_loss": "verl.workers.utils.losses",
    "sft_loss": "verl.workers.utils.losses",
    "value_loss": "verl.workers.utils.losses",
    "Metric": "verl.utils.metric",
    "AggregationType": "verl.utils.metric",
    "append_to_dict": "verl.utils.py_functional",
    "build_optimizer": "verl.workers.config.optimizer",
    "PrecisionType": "verl.utils.torch_dtypes",
    "get_init_weight_context_manager": "verl.utils.fsdp_utils",
    "get_device_id": "verl.utils.device",
    "get_device_name": "verl.utils.device",
    # Workers.
    "ActorRolloutRefWorker": "verl.workers.engine_workers",
    "DetachActorWorker": "verl.experimental.separation.engine_workers",
    "TrainingWorker": "verl.workers.engine_workers",
    # Trainers.
    "PPOTrainer": "verl.trainer.ppo.v1.trainer_base",
    "PPOTrainerColocateAsync": "verl.trainer.ppo.v1.trainer_colocate_async",
    "PPOTrainerSeparateAsync": "verl.trainer.ppo.v1.trainer_separate_async",
    "PPOTrainerSync": "verl.trainer.ppo.v1.trainer_sync",
    "TRAINER_REGISTRY": "verl.trainer.ppo.v1.trainer_base",
    "ReplayBuffer": "verl.trainer.ppo.v1.replay_buffer",
    "ReplayBufferAsync": "verl.trainer.ppo.v1.replay_buffer",
    "Role": "verl.trainer.ppo.utils",
    "need_critic": "verl.trainer.ppo.utils",
    "need_reference_policy": "verl.trainer.ppo.utils",
    "validate_config": "verl.utils.config",
    "CheckpointCallback": "verl.trainer.ppo.checkpoint_callback",
    "Tracking": "verl.utils.tracking",
    "ADV_ESTIMATOR_REGISTRY": "verl.trainer.ppo.core_algos",
    "POLICY_LOSS_REGISTRY": "verl.trainer.ppo.core_algos",
    "apply_kl_penalty": "verl.trainer.ppo.ray_trainer",
    "compute_advantage": "verl.trainer.ppo.ray_trainer",
    "get_reward_manager_cls": "verl.experimental.reward_loop.reward_manager",
    "compute_rollout_correction_and_add_to_batch": "verl.trainer.ppo.rollout_corr_helper",
    "get_adv_estimator_fn": "verl.trainer.ppo.core_algos",
    "log_seqlen_unbalance": "verl.utils.seqlen_balancing",
    "masked_whiten": "verl.utils.torch_functional",
    "response_from_nested": "verl.workers.utils.padding",
    "response_to_nested": "verl.workers.utils.padding",
    "upsample_batch_to_divisible_size": "verl.trainer.ppo.padding_utils",
    "KVBatchMeta": "transfer_queue",
    # The actors that store the rows; set in the process that started them.
    "_TQ_STORAGE": "transfer_queue.interface",
    # Supervised fine-tuning.
    "SFTTrainer": "verl.trainer.sft_trainer",
    "destroy_global_process_group": "verl.utils.distributed",
    "initialize_global_process_group": "verl.utils.distributed",
    # Rollout side.
    "_ROLLOUT_REGISTRY": "verl.workers.rollout.base",
    "GlobalRequestLoadBalancer": "verl.workers.rollout.router",
    "AgentLoopManagerTQ": "verl.trainer.ppo.v1.agent_loop_tq",
    "AgentLoopWorkerTQ": "verl.trainer.ppo.v1.agent_loop_tq",
    "_agent_loop_registry": "verl.experimental.agent_loop.agent_loop",
    "apply_greedy_sampling_params": "verl.trainer.ppo.v1.agent_loop_tq",
    "omega_conf_to_dataclass": "verl.utils.config",
    "get_hf_auto_model_class": "verl.utils.model",
    "build_multimodal_processor_inputs": "verl.utils.tokenizer",
    "get_processor_token_id": "verl.utils.tokenizer",
    "update_model_config": "verl.utils.model",
}
"""Modules of private and semi-public names."""

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
