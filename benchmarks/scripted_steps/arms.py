"""What starts a run: stock verl as its Qwen3-8B script sets it up, and the same command with `tree_sync`.

The script is `tree_rl.benchmark.against_verl.engines.EXAMPLE`. What differs from it in both arms: FSDP2, one server per
GPU, one optimizer step for all rows of a step, and lengths that fit the sessions.
"""

import argparse
from pathlib import Path
from typing import Any

from transformers.utils import is_flash_attn_2_available

from scripted_steps.inputs import AGENT_LOOPS, PROMPTS
from scripted_steps.session_scripts import Script
from tree_rl.benchmark.against_verl.engines import KL_COEF, KL_TYPE, LEARNING_RATE, MAX_TOKENS
from tree_rl.benchmark.against_verl.without_flash_attention_2 import NAME as FLASH_ATTENTION_4
from tree_rl.models.fused_layers import ROTARY_KERNEL

STOCK, TREE = "verl", "tree_rl"
ARMS = (STOCK, TREE)
ACTOR, REF, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "ref", "rollout", "model"))
ATTENTION = f"++{MODEL}.override_config.attn_implementation"
SAMPLER = "trainer.v1.sampler.custom_sampler"
CPU = ["hydra.searchpath=[pkg://tree_rl.verl_plugin.config]", "+machine=cpu", "ray_kwargs.ray_init.num_cpus=24"]
"""verl itself has no settings for a CPU."""
GPU_MEMORY = 0.6
"""Share that vLLM may take."""


def stock_attention(gpus: int) -> str:
    """How rows attend in the stock arm."""
    if not gpus:
        return "row by row, SDPA"
    return "flash_attention_2" if is_flash_attn_2_available() else FLASH_ATTENTION_4


def environment_of(arm: str, gpus: int) -> dict[str, str]:
    """Variables that an arm needs."""
    chosen = dict([ROTARY_KERNEL])  # otherwise Liger compiles for every micro-batch of the stock arm
    if arm == STOCK:  # apart, verl 0.9.1 logs a line of level INFO in a way that raises
        chosen["VERL_LOGGING_LEVEL"] = "WARN"
    if arm == TREE or not gpus:  # the CPU's rollout engine is the plugin's
        chosen["VERL_USE_EXTERNAL_MODULES"] = "tree_rl.verl_plugin"
    if not gpus:
        chosen["TORCH_COMPILE_DISABLE"] = "1"
        if arm == STOCK:  # verl lists its own engine for accelerators alone
            chosen["VERL_ENGINE_DEVICE"] = "cuda"
    return chosen


def overrides_of(arguments: argparse.Namespace, arm: str, script: Script, folder: Path, model: Path) -> list[str]:
    """Overrides of `verl.trainer.main_ppo` for one arm on one script.

    Args:
        arguments: of whole_step.py.
        arm: one of `ARMS`.
        script: what the sessions of a step do.
        folder: of the run, with prompts and agent loop.
        model: its folder.
    """
    longest = script.longest_prompt + script.longest_response
    tokens = max(arguments.max_tokens or MAX_TOKENS, longest)
    buffer = f"Timed{'Tree' if arm == TREE else ''}ReplayBuffer{'Async' if arguments.apart else ''}"
    eager = str(arguments.eager).lower()
    in_vllm = [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.enforce_eager={eager}"]
    in_vllm.append(f"{ROLLOUT}.gpu_memory_utilization={GPU_MEMORY}")
    return [
        *(in_vllm if arguments.gpus else CPU),
        "algorithm.adv_estimator=grpo",
        "algorithm.use_kl_in_reward=false",
        f"data.train_files={folder / PROMPTS}",
        f"data.val_files={folder / PROMPTS}",
        f"data.train_batch_size={arguments.prompts}",
        f"data.max_prompt_length={script.longest_prompt}",
        f"data.max_response_length={script.longest_response}",
        "data.dataloader_num_workers=0",
        "data.shuffle=false",
        f"{MODEL}.path={model}",
        f"{MODEL}.use_remove_padding=true",
        f"{MODEL}.enable_gradient_checkpointing=true",
        f"{MODEL}.use_liger={str(arguments.liger).lower()}",
        f"{ACTOR}.strategy=fsdp2",
        f"{ACTOR}.optim.lr={LEARNING_RATE}",
        f"{ACTOR}.use_dynamic_bsz=true",
        f"{ACTOR}.ppo_max_token_len_per_gpu={tokens}",
        # verl pins the memory of a reference on FSDP2, which takes a GPU.
        f"{ACTOR}.use_kl_loss={str(arguments.gpus > 0).lower()}",
        f"{ACTOR}.kl_loss_coef={KL_COEF}",
        f"{ACTOR}.kl_loss_type={KL_TYPE}",
        f"{ACTOR}.entropy_coeff=0",
        f"{REF}.log_prob_use_dynamic_bsz=true",
        f"{REF}.log_prob_max_token_len_per_gpu={tokens}",
        f"{REF}.fsdp_config.param_offload=true",
        f"{ROLLOUT}.n={arguments.sessions}",
        f"{ROLLOUT}.tensor_model_parallel_size=1",
        f"{ROLLOUT}.log_prob_use_dynamic_bsz=true",
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu={tokens}",
        f"{ROLLOUT}.agent.agent_loop_config_path={folder / AGENT_LOOPS}",
        f"{SAMPLER}.path=pkg://scripted_steps.scripted_agent_loop",
        f"{SAMPLER}.name={buffer}",
        f"trainer.n_gpus_per_node={max(1, arguments.gpus - arguments.apart)}",
        "trainer.nnodes=1",
        "trainer.balance_batch=true",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        "trainer.total_epochs=100000",
        f"trainer.total_training_steps={steps_of(arguments)}",
        "trainer.logger=[console,file]",
        f"trainer.default_local_dir={folder / 'checkpoints'}",
        *(_of_tree(arguments) if arm == TREE else _of_stock(arguments, script)),
        *(_apart(arguments, arm) if arguments.apart else ()),
        *arguments.override,
    ]


def steps_of(arguments: argparse.Namespace) -> int:
    """Steps of a run; the last one only ends the one before."""
    return int(arguments.unmeasured + arguments.steps + 1)


def _apart(arguments: argparse.Namespace, arm: str) -> list[str]:
    """verl's separate async trainer, one update for each synchronisation, one step of rollouts ahead."""
    backend = [f"{ROLLOUT}.checkpoint_engine.backend={'nccl' if arguments.gpus else 'gloo'}"]
    if not arguments.gpus:
        module = "tree_rl.verl_plugin.embedded_rollout.gloo_weights"
        backend.append(f"{ROLLOUT}.checkpoint_engine.custom_backend_module={module}")
        backend.append(f"ray_kwargs.ray_init.num_gpus={1 + arguments.apart}")
    return [
        f"trainer.v1.trainer_mode={'tree_' if arm == TREE else ''}separate_async",
        "trainer.v1.separate_async.parameter_sync_step=1",
        "trainer.v1.separate_async.num_warmup_batches=1",
        "actor_rollout_ref.hybrid_engine=false",
        f"{ROLLOUT}.nnodes=1",
        f"{ROLLOUT}.n_gpus_per_node={arguments.apart}",
        # verl wants a step's prompts here, so stock verl makes an optimizer step of every prompts * sessions rows.
        f"{ACTOR}.ppo_mini_batch_size={arguments.prompts}",
        *backend,
    ]


def _of_tree(arguments: argparse.Namespace) -> list[str]:
    return ["trainer.v1.trainer_mode=tree_sync", f"{ACTOR}.ppo_mini_batch_size={arguments.prompts}"]


def _of_stock(arguments: argparse.Namespace, script: Script) -> list[str]:
    # verl counts an optimizer step's rows as prompts times sessions, whatever rows a session has.
    rows = -(-script.rows // arguments.sessions)
    overrides = ["trainer.v1.trainer_mode=sync", f"{ACTOR}.ppo_mini_batch_size={rows}"]
    if not arguments.gpus:
        library = "scripted_steps.row_by_row"
        return [*overrides, f"{MODEL}.external_lib={library}", f"{ATTENTION}=tree_rl_row_by_row"]
    if stock_attention(arguments.gpus) == FLASH_ATTENTION_4:
        library = "scripted_steps.without_flash_attention_2"
        return [*overrides, f"{MODEL}.external_lib={library}", f"{ATTENTION}={FLASH_ATTENTION_4}"]
    return overrides


def vllm_settings(model: Path, *, eager: bool) -> dict[str, Any]:
    """Arguments of vLLM's engine, as verl 0.9.1 (`config/rollout/rollout.yaml`) and the arms set them."""
    return {
        "model": str(model),
        "dtype": "bfloat16",
        "enforce_eager": eager,
        "gpu_memory_utilization": GPU_MEMORY,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 256,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"},
    }
