"""What the arms of swe_learning.py change in the configuration of `recipes/swe_grpo`, and the ways to roll out."""

from collections.abc import Mapping, Sequence

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
AGENT = f"{ROLLOUT}.custom.gateway_agent"
ATTENTION = "++actor_rollout_ref.model.override_config.attn_implementation"
ROWS = [
    "algorithm.adv_estimator=full_tree",
    "actor_rollout_ref.model.model_type=language_model",
    f"{ACTOR}.fsdp_config._target_=verl.workers.config.FSDPEngineConfig",
    f"~{ACTOR}.fsdp_config.tree",
    # Without flash-attn its attention would mask whole micro-batches.
    "actor_rollout_ref.model.external_lib=swe_learning_rows",
    f"{ATTENTION}=tree_rl_row_by_row",
]
ARMS: Mapping[str, Sequence[str]] = {
    "tree": ["algorithm.adv_estimator=full_tree"],
    "flat": ROWS,
    "longest": ["algorithm.adv_estimator=longest_path"],
    # How far two runs of one arm part.
    "flat_again": ROWS,
}
FLOAT32 = [
    f"{ROLLOUT}.dtype=float32",
    f"{ACTOR}.fsdp_config.dtype=float32",
    f"++{ACTOR}.fsdp_config.mixed_precision={{param_dtype: fp32, reduce_dtype: fp32, buffer_dtype: fp32}}",
]
ROLLOUTS: Mapping[str, Sequence[str]] = {
    # In this order an arm tries them. The GPU has room for trainer and server at a time, so neither sleeps.
    "vllm": [
        f"{ROLLOUT}.name=vllm",
        f"{ROLLOUT}.enforce_eager=true",
        f"{ROLLOUT}.free_cache_engine=false",
        f"++{ROLLOUT}.enable_sleep_mode=false",
        f"{ROLLOUT}.gpu_memory_utilization=0.3",
    ],
    "vllm_sleep": [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.enforce_eager=true", f"{ROLLOUT}.gpu_memory_utilization=0.3"],
    "hf": [f"{ROLLOUT}.name=hf", f"{ROLLOUT}.free_cache_engine=false"],
}
