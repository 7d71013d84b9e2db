"""Saves what an engine learns and verl does not save: the budget of `tree.max_tokens: auto`, costs, a loss scale.

One small file per rank next to verl's; without it, or with another number of ranks, the engine starts learning again.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from tree_rl.training.step import TreeStep


def state_file(folder: str) -> Path:
    """This rank's file in an engine's checkpoint."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return Path(folder, f"tree_engine_world_size_{ranks}_rank_{rank}.json")


def device_bytes() -> int:
    """Memory of this rank's GPU, for which a budget was learnt; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory


def save_engine_state(folder: str, step: TreeStep, scaler: Any) -> None:
    """Write the file; `scaler` is verl's gradient scaler of float16 training, or None."""
    state = {
        "device_bytes": device_bytes(),
        "sharing_ranks": step.context.sharing_ranks,
        "budget": step.learner.budget.state(),
        "costs": None if step.learner.calls.fit is None else step.learner.calls.fit.state(),
        "scaler": None if scaler is None else scaler.state_dict(),
    }
    state_file(folder).write_text(json.dumps(state))


def load_engine_state(folder: str, step: TreeStep, scaler: Any) -> None:
    """Restore the state from the file, if it exists."""
    path = state_file(folder)
    if not path.exists():
        return
    state = json.loads(path.read_text())
    # Budgets and costs count the tokens of all ranks that share a forest.
    if (state["device_bytes"], state.get("sharing_ranks", 1)) == (device_bytes(), step.context.sharing_ranks):
        step.learner.budget.restore(state["budget"])
        # Checkpoints of earlier versions have no costs.
        if step.learner.calls.fit is not None and state.get("costs") is not None:
            step.learner.calls.fit.restore(state["costs"])
    if scaler is not None and state["scaler"] is not None:
        scaler.load_state_dict(state["scaler"])
