"""One real batch of the run, updated again and again as trees and as rows in one process: time, and the difference.

The rows are those of GRPO's first step, so the weights are those that generated them: the warm start's.
"""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tree_rl.benchmark.against_verl.engines import build_engine
from tree_rl.benchmark.against_verl.verl_updates import Side, gradients_of, update
from tree_rl.benchmark.against_verl.worker_rows import rows_as_received
from tree_rl.benchmark.batch import Batch
from tree_rl.benchmark.comparison import time_in_turns
from tree_rl.benchmark.gradient_errors import relative_error
from tree_rl.benchmark.phases import UPDATE
from tree_rl.verl_plugin.agent_loops.tree_dump import FinishedRow, read_trees
from tree_rl.verl_plugin.options import TreeConfig

MICRO_BATCH_TOKENS = {"tree": 16384, "flat": 1024}
"""Rows are packed into one sequence whose attention mask is dense on a CPU: 1024 is their fastest budget (of 512, 1024,
2048, 4096 and 16384, five times slower)."""


def side_of(model: Path, mode: str) -> Side:
    """The actor's engine as the run has it, in one mode of `tree.mode`."""
    engine = build_engine(
        model,
        tree=TreeConfig(mode=mode, self_check=False),
        dtype=torch.float32,
        checkpointing=False,
        model_dtype="fp32",
        use_torch_compile=False,
    )
    return Side(engine=engine, max_tokens=MICRO_BATCH_TOKENS[mode])


def batch_of(rows: list[FinishedRow]) -> Batch:
    """Rows of complete groups as one optimizer step."""
    trained = [np.array([0] * len(row.prompt_ids) + list(row.response_mask), dtype=bool) for row in rows]
    return Batch(
        name="step 1",
        rows=tuple(np.array(row.token_ids, dtype=np.int64) for row in rows),
        trained=tuple(trained),
        groups=tuple(row.uid for row in rows),
        advantage_B=group_advantages(rows),
    )


def group_advantages(rows: list[FinishedRow]) -> np.ndarray:
    """GRPO's advantage of every row, float32 [rows]: its session's reward against the other sessions of the task."""
    groups: dict[str, list[float]] = {}
    for (uid, _), reward in {(row.uid, row.session): row.reward or 0.0 for row in rows}.items():
        groups.setdefault(uid, []).append(reward)
    scales = {uid: (np.mean(rewards), np.std(rewards, ddof=1) + 1e-6) for uid, rewards in groups.items()}
    return np.array([((row.reward or 0.0) - scales[row.uid][0]) / scales[row.uid][1] for row in rows], dtype=np.float32)


def log_probs(side: Side, batch: Batch) -> torch.Tensor:
    """Log-prob of every token after a row's first, and a last entry without meaning, of all rows together."""
    with side.engine.eval_mode(disable_auto_offload=True):
        data = rows_as_received(batch, max_tokens=side.budget(batch))
        return side.engine.infer_batch(data)["model_output"]["log_probs"].values()


def replay(model: Path, batch: Batch, *, repeats: int) -> dict[str, Any]:
    """Measure updates of the same rows in both modes, interleaved.

    Args:
        model: Hugging Face folder.
        batch: The rows.
        repeats: Timed updates of each mode, after one that is not counted.

    Returns:
        `seconds` of each mode, `log_prob_error` (largest absolute), `gradient_error` (largest relative, by parameter).
    """
    sides = {mode: side_of(model, mode) for mode in MICRO_BATCH_TOKENS}
    tree, flat = (log_probs(side, batch) for side in sides.values())
    trained = torch.from_numpy(np.concatenate([np.append(mask[1:], False) for mask in batch.trained]))
    # Compared before the first update, which moves the weights.
    pairs = zip(*(gradients_of(side, batch) for side in sides.values()), strict=True)
    gradient_error = max(relative_error([ours], [theirs]) for ours, theirs in pairs)
    updates = {mode: partial(update, side, batch) for mode, side in sides.items()}
    times = time_in_turns(updates, repeats=repeats + 1)
    return {
        "rows": len(batch.rows),
        "seconds": {mode: [one.phases[UPDATE] for one in spent[1:]] for mode, spent in times.items()},
        "log_prob_error": float((tree - flat).abs()[trained].max()),
        "gradient_error": gradient_error,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("trees", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    result = replay(arguments.model, batch_of(read_trees(arguments.trees, 1)), repeats=arguments.repeats)
    arguments.output.write_text(json.dumps(result))
    torch.distributed.destroy_process_group()
