"""vLLM as verl starts it, and the settings of that which the tests share."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tiny_sizes import sizes
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from tree_rl.rollout.transcript import ModelCall, Row, rows_of_calls
from tree_rl.tree.forest import Forest

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS / "rollout"), str(TESTS / "verl_plugin")]
import toy_qwen  # noqa: E402

ON_A_CPU = (
    "actor_rollout_ref.rollout.dtype=float32",
    "actor_rollout_ref.rollout.enforce_eager=true",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.calculate_log_probs=true",
    # A CPU has no memory of an accelerator to give back between rollout and update.
    "actor_rollout_ref.rollout.free_cache_engine=false",
)
SLEEPLESS = "+actor_rollout_ref.rollout.enable_sleep_mode=false"
ON_A_GPU = (
    *ON_A_CPU[:-1],
    "trainer.device=cuda",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.1",
    # vLLM measures memory otherwise, and fails where a job beside it gives some back meanwhile.
    "++actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes=2147483648",
    "actor_rollout_ref.rollout.agent.num_workers=1",
    "actor_rollout_ref.actor.fsdp_config.model_dtype=fp32",
    f"++actor_rollout_ref.actor.fsdp_config.mixed_precision={toy_qwen.FLOAT32}",
    "++actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    "reward.num_workers=1",
    "trainer.logger=[console]",
    "trainer.n_gpus_per_node=1",
)
"""In float32, too, so that the same figures agree; vLLM sleeps during updates."""
GPU = torch.cuda.is_available()
HERE = ON_A_GPU if GPU else ON_A_CPU
"""These tests run where vLLM's build does."""
ROLLOUT_OVERRIDES = ("actor_rollout_ref.rollout.name=vllm", *HERE, *(() if GPU else (SLEEPLESS,)))


def save_model(folder: Path, tokenizer: Any, *, experts: int = 0, tied: bool = False) -> Path:
    """A random Qwen3 that vLLM's attention on a CPU accepts (heads of at least 32), with logits far from uniform.

    Two of a layer's experts visit a token; a tied head has the embedding's weights, as in small Qwen3 models.
    """
    torch.manual_seed(0)
    sparse = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    own = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "tie_word_embeddings": tied}
    usual = sizes(vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, head_dim=32, **own)
    usual |= {"max_position_embeddings": 2048, "bos_token_id": None, "dtype": "float32"}
    config = (Qwen3MoeConfig if experts else Qwen3Config)(**usual, **(sparse if experts else {}))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def environment(**more: str) -> Mapping[str, str]:
    """What every process of a run with an engine needs."""
    on_a_cpu = {"TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return {
        # As in this process, which may have started Ray's parts already.
        "RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "disabled"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        # Triton multiplies float32 in TF32 by default, cuDNN convolves images in it.
        **({"TRITON_F32_DEFAULT": "ieee", "NVIDIA_TF32_OVERRIDE": "0"} if GPU else on_a_cpu),
        **more,
    }


LOG_PROB_TOLERANCE = 1e-4


def engine_log_probs(served: SimpleNamespace, rows: list[Any]) -> list[list[float]]:
    """Log-probs of every response token, from the tree engine as verl's worker calls it."""
    from engine_harness import Row, build_engine, ppo_batch
    from verl.workers.utils.padding import response_from_nested

    from tree_rl.verl_plugin.options import TreeConfig

    engine = build_engine(served.model, tree=TreeConfig(mode="tree", self_check=False))
    data = ppo_batch(
        [Row(tokens=list(row.token_ids), prompt=len(row.prompt_ids), mask=list(row.response_mask)) for row in rows]
    )
    with engine.eval_mode(disable_auto_offload=True):
        output = engine.infer_batch(data)["model_output"]["log_probs"]
    return [values.tolist() for values in response_from_nested(output, data["response_mask"]).unbind()]


def trained_differences(row: Row, replayed: list[float]) -> list[float]:
    """How far the log-prob that each trained token was drawn with is from another computation of it."""
    assert row.response_log_probs is not None
    pairs = zip(row.response_mask, row.response_log_probs, replayed, strict=True)
    return [abs(drawn - again) for mask, drawn, again in pairs if mask]


def check_agreement(served: SimpleNamespace, calls: Sequence[ModelCall]) -> None:
    """The tree engine computes the log-probs of every trained token, and shares what the rows share.

    The agreement ends at a token that another took the place of.
    """
    rows = rows_of_calls(calls)
    forest = Forest.from_rows([np.asarray(row.token_ids) for row in rows])
    assert len(rows) >= 4 and forest.num_unique < 0.8 * forest.num_flat
    again = engine_log_probs(served, rows)
    differences = [trained_differences(row, replayed) for row, replayed in zip(rows, again, strict=True)]
    trained, worst = sum(map(len, differences)), max(map(max, differences))
    print(f"\n{trained} trained tokens in {len(rows)} rows, largest difference of log-probs {worst:.2e}")
    assert trained >= 150
    assert worst < LOG_PROB_TOLERANCE
    row = rows[0]
    foreign = (row.response_ids[3] + 1) % len(served.tokenizer)
    changed = replace(row, response_ids=(*row.response_ids[:3], foreign, *row.response_ids[4:]))
    differences = trained_differences(changed, *engine_log_probs(served, [changed]))
    assert max(differences[:3]) < LOG_PROB_TOLERANCE
    assert median(differences[3:30]) > 100 * LOG_PROB_TOLERANCE
