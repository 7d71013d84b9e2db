"""One real batch of the run, updated again and again as trees and as rows in one process: time, and the difference.

The rows are those of GRPO's first step, so the weights are those that generated them: the warm start's.
"""

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import EngineRegistry
from verl.workers.utils.losses import ppo_loss

from tree_rl.verl_plugin.agent_loops.tree_dump import FinishedRow, read_trees
from tree_rl.verl_plugin.options import TreeConfig, TreeFSDPEngineConfig
from tree_rl.verl_plugin.sft import join_as_only_rank

MICRO_BATCH_TOKENS = {"tree": 16384, "flat": 1024}
"""Rows are packed into one sequence whose attention mask is dense on a CPU: 1024 is their fastest budget (of 512, 1024,
2048, 4096 and 16384, five times slower)."""
FLOAT32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


def build_engine(model: Path, mode: str) -> Any:
    """Create the actor's engine as the run has it, in one mode of `tree.mode`."""
    engine = EngineRegistry.new(
        model_type="tree_language_model",
        backend="fsdp2",
        model_config=HFModelConfig(
            path=str(model), override_config={"attn_implementation": "sdpa"}, enable_gradient_checkpointing=False
        ),
        engine_config=TreeFSDPEngineConfig(
            strategy="fsdp2",
            use_torch_compile=False,
            mixed_precision=FLOAT32,
            model_dtype="fp32",
            tree=TreeConfig(mode=mode, self_check=False),
        ),
        optimizer_config=FSDPOptimizerConfig(lr=0.0, weight_decay=0.0, total_training_steps=100),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine


def as_batch(rows: list[FinishedRow]) -> TensorDict:
    """Rows as verl's workers receive them, old log-probs still missing."""
    advantages = group_advantages(rows)
    masks = [torch.tensor(row.response_mask) for row in rows]
    return tu.get_tensordict(
        {
            "input_ids": _nested([torch.tensor(row.token_ids) for row in rows]),
            "position_ids": _nested([torch.arange(len(row.token_ids)) for row in rows]),
            "prompts": _nested([torch.tensor(row.prompt_ids) for row in rows]),
            "responses": _nested([torch.tensor(row.response_ids) for row in rows]),
            "response_mask": _nested(masks),
            "loss_mask": _nested(masks),
            "advantages": _nested(
                [torch.full(mask.shape, float(value)) for mask, value in zip(masks, advantages, strict=True)]
            ),
            "uid": [row.uid for row in rows],
            "temperature": torch.ones(len(rows)),
        },
        non_tensor_dict={
            "use_remove_padding": True,
            "use_dynamic_bsz": True,
            "global_batch_size": len(rows),
        },
    )


def group_advantages(rows: list[FinishedRow]) -> np.ndarray:
    """GRPO's advantage of every row: its session's reward against the other sessions of the task.

    Args:
        rows: Complete groups.

    Returns:
        float32 [rows].
    """
    advantages = np.zeros(len(rows), dtype=np.float32)
    for uid in {row.uid for row in rows}:
        members = [index for index, row in enumerate(rows) if row.uid == uid]
        rewards = {rows[index].session: rows[index].reward for index in members}
        values = np.array(list(rewards.values()), dtype=np.float64)
        for index in members:
            advantages[index] = (rewards[rows[index].session] - values.mean()) / (values.std(ddof=1) + 1e-6)
    return advantages


def update(engine: Any, data: TensorDict, loss: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """One forward and backward over the batch.

    Returns:
        Seconds, and the gradient of every parameter.
    """
    engine.optimizer_zero_grad()
    started = time.perf_counter()
    with engine.train_mode(disable_auto_offload=True):
        engine.forward_backward_batch(data, loss)
        seconds = time.perf_counter() - started
        gradients = {name: p.grad.full_tensor().clone() for name, p in engine.module.named_parameters()}
    return seconds, gradients


def log_probs(engine: Any, data: TensorDict) -> torch.Tensor:
    """Log-prob of every token of every row, float32 [F]."""
    with engine.eval_mode(disable_auto_offload=True), torch.no_grad():
        return engine.forward_backward_batch(data, None, forward_only=True)["model_output"]["log_probs"].values()


def trained_positions(rows: list[FinishedRow]) -> torch.Tensor:
    """bool [F]: positions whose next token is trained."""
    flags = [[*([0] * (len(row.prompt_ids) - 1)), *row.response_mask, 0] for row in rows]
    return torch.tensor([flag for row in flags for flag in row], dtype=torch.bool)


def replay(model: Path, rows: list[FinishedRow], *, repeats: int) -> dict[str, Any]:
    """Measure updates of the same rows in both modes, interleaved.

    Args:
        model: Hugging Face folder.
        rows: The batch.
        repeats: Timed updates of each mode, after one that is not counted.

    Returns:
        `seconds` of each mode, `log_prob_error` (largest absolute), `gradient_error` (largest relative, by parameter).
    """
    engines = {mode: build_engine(model, mode) for mode in MICRO_BATCH_TOKENS}
    data = as_batch(rows)
    trained = trained_positions(rows)
    scored = {}
    for mode, engine in engines.items():
        tu.assign_non_tensor(data, max_token_len_per_gpu=MICRO_BATCH_TOKENS[mode])
        scored[mode] = log_probs(engine, data)
    error = float((scored["tree"] - scored["flat"]).abs()[trained].max())
    pieces = scored["flat"].split([len(row.token_ids) for row in rows])
    data["old_log_probs"] = _nested(
        [piece[len(row.prompt_ids) - 1 : -1] for piece, row in zip(pieces, rows, strict=True)]
    )
    config = FSDPActorConfig(strategy="fsdp2", rollout_n=8, ppo_micro_batch_size_per_gpu=1)
    loss = partial(ppo_loss, config=config)
    seconds: dict[str, list[float]] = {"tree": [], "flat": []}
    gradients: dict[str, dict[str, torch.Tensor]] = {}
    for turn in range(1 + repeats):
        for mode, engine in engines.items():
            tu.assign_non_tensor(data, max_token_len_per_gpu=MICRO_BATCH_TOKENS[mode])
            took, gradients[mode] = update(engine, data, loss)
            if turn:
                seconds[mode].append(took)
    relative = [
        float((gradients["tree"][name] - flat).norm() / flat.norm()) for name, flat in gradients["flat"].items()
    ]
    return {"rows": len(rows), "seconds": seconds, "log_prob_error": error, "gradient_error": max(relative)}


def _nested(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("trees", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    join_as_only_rank()
    torch.distributed.init_process_group("gloo")
    result = replay(arguments.model, read_trees(arguments.trees, 1), repeats=arguments.repeats)
    arguments.output.write_text(json.dumps(result))
    torch.distributed.destroy_process_group()
