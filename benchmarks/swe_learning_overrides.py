"""What swe_learning.py changes in `recipes/swe_grpo`: for all arms, for each, for each way to roll out."""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
AGENT = f"{ROLLOUT}.custom.gateway_agent"
ATTENTION = "++actor_rollout_ref.model.override_config.attn_implementation"


def branching(policy: str, **options: float) -> list[str]:
    """Overrides by which finished sessions branch."""
    settings = [f"policy={policy}", *(f"options.{name}={value}" for name, value in options.items())]
    return [f"+{AGENT}.branching.{setting}" for setting in settings]


TREE = ["algorithm.adv_estimator=full_tree"]
ROWS = [
    *TREE,
    "actor_rollout_ref.model.model_type=language_model",
    f"{ACTOR}.fsdp_config._target_=verl.workers.config.FSDPEngineConfig",
    f"~{ACTOR}.fsdp_config.tree",
    # Without flash-attn its attention would mask whole micro-batches.
    "actor_rollout_ref.model.external_lib=swe_learning_rows",
    f"{ATTENTION}=tree_rl_row_by_row",
]
FLOAT32 = [
    f"{ROLLOUT}.dtype=float32",
    f"{ACTOR}.fsdp_config.dtype=float32",
    f"++{ACTOR}.fsdp_config.mixed_precision={{param_dtype: fp32, reduce_dtype: fp32, buffer_dtype: fp32}}",
]
CREDIT: Mapping[str, Sequence[str]] = {
    # GRPO on every path of a session.
    "tree": TREE,
    "longest": ["algorithm.adv_estimator=longest_path"],
    # These agents report no states: calls that saw the same results start from one state.
    "gigpo": ["algorithm.adv_estimator=gigpo", "+algorithm.credit.states=observation"],
    "tree_grpo": ["algorithm.adv_estimator=tree_grpo", *branching("turns", expansions=1)],
    "treerl": ["algorithm.adv_estimator=treerl", *branching("turns", expansions=1)],
    "turns": [*TREE, *branching("turns", expansions=1)],
    "entropy": [*TREE, *branching("entropy", branches=2)],
    # What arms that branch are worth without their branches.
    "half": TREE,
}
"""Estimators and policies of branching, for any agent behind the gateway."""
HALVED = ("tree_grpo", "treerl", "turns", "entropy", "half")
"""Arms that begin with half as many sessions; those of all but `half` then branch."""
ARMS: Mapping[str, Sequence[str]] = {
    **CREDIT,
    "flat": ROWS,
    # How far two runs of one arm part.
    "flat_again": ROWS,
    # Rollout and training in float32, where a draw hardly depends on what else is in a batch.
    "tree_float32": [*TREE, *FLOAT32],
    "flat_float32": [*ROWS, *FLOAT32],
}
IN_FLOAT32 = {"TRITON_F32_DEFAULT": "ieee"}
"""Variables of float32 arms: vLLM attends with a Triton kernel in float32, which would round to tf32 otherwise."""
KEY_VALUE_BYTES = 8 << 30
"""186,000 tokens of SmolLM2-135M in float32. A fixed size, as vLLM would measure what arms beside it take."""
IN_VLLM = [
    f"{ROLLOUT}.name=vllm",
    f"{ROLLOUT}.enforce_eager=true",
    f"{ROLLOUT}.gpu_memory_utilization=0.1",
    f"++{ROLLOUT}.engine_kwargs.vllm.kv_cache_memory_bytes={KEY_VALUE_BYTES}",
]
ROLLOUTS: Mapping[str, Sequence[str]] = {
    # The GPU has room for trainer and server at a time, so neither sleeps.
    "vllm": [*IN_VLLM, f"{ROLLOUT}.free_cache_engine=false", f"++{ROLLOUT}.enable_sleep_mode=false"],
    "vllm_sleep": IN_VLLM,
    "hf": [f"{ROLLOUT}.name=hf", f"{ROLLOUT}.free_cache_engine=false"],
}


def run_name(arm: str, seed: int) -> str:
    """Name of a run, of its log, its metrics and its folder."""
    return f"{arm}_{seed}"


def rows_folder(arguments: argparse.Namespace, arm: str, seed: int) -> Path:
    """Where a run dumps its rows."""
    return arguments.output / f"{run_name(arm, seed)}_rows"


def first_sessions(arm: str, sessions: int) -> int:
    """How many of a prompt's sessions an arm starts with (`rollout.n`); the others branch from these."""
    return sessions // 2 if arm in HALVED else sessions


def environment_of_arm(arm: str, device: str) -> dict[str, str]:
    """Variables that an arm needs."""
    # verl lists its own engine for accelerators alone; under this name it runs on the CPU all the same.
    engine = {"VERL_ENGINE_DEVICE": "cuda"} if "flat" in arm and device == "cpu" else {}
    return {**engine, **(IN_FLOAT32 if "float32" in arm else {})}


def overrides_of(arguments: argparse.Namespace, arm: str, seed: int) -> list[str]:
    """Overrides of the recipe for a run."""
    settled = ["~ray_kwargs.ray_init.num_gpus", "~ray_kwargs.ray_init.include_dashboard"]
    return [
        *ROLLOUTS[arguments.rollout],
        *(settled if arguments.device == "cpu" else []),
        "ray_kwargs.ray_init.num_cpus=null",
        f"{ROLLOUT}.calculate_log_probs=true",
        f"{ROLLOUT}.agent.num_workers={arguments.agent_workers}",
        f"++{ROLLOUT}.custom.tree_dump_dir={rows_folder(arguments, arm, seed)}",
        f"+{AGENT}.seed={seed}",
        f"+{AGENT}.agent_options.options.think=strip",
        f"+{AGENT}.gateway.reasoning=inline",
        f"{AGENT}.agent_options.timeout_seconds={arguments.session_seconds}",
        "reward.num_workers=1",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "data.dataloader_num_workers=0",
        f"data.seed={seed}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        f"{ATTENTION}=sdpa",
        f"{ACTOR}.use_torch_compile=false",
        f"{ACTOR}.fsdp_config.use_torch_compile=false",
        f"{ACTOR}.calculate_entropy=true",
        "trainer.logger=[console,file]",
        "trainer.resume_mode=disable",
        *(f"+{AGENT}.agent_options.sandbox.{key}={json.dumps(value)}" for key, value in arguments.sandbox.items()),
        *ARMS[arm],
        *arguments.override,
    ]
