"""What an engine learns while it trains and verl does not save: the budget of `tree.max_tokens: auto`, costs, a
loss scale.

One small file per rank beside verl's own; without it, as with another number of ranks, the engine learns anew.
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
    """Memory of this rank's GPU; 0 without one. A budget learnt for one size is not one for another."""
    if not torch.cuda.is_available():
        return 0
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory


def save_engine_state(folder: str, step: TreeStep, scaler: Any) -> None:
    """Write the file.

    Args:
        folder: of this rank's checkpoint; exists.
        step: has learnt its budget and its costs.
        scaler: verl's gradient scaler of float16 training, or None.
    """
    state = {
        "device_bytes": device_bytes(),
        "sharing_ranks": step.context.sharing_ranks,
        "budget": step.knowledge.budget.state(),
        "costs": None if step.knowledge.calls.fit is None else step.knowledge.calls.fit.state(),
        "scaler": None if scaler is None else scaler.state_dict(),
    }
    state_file(folder).write_text(json.dumps(state))


def load_engine_state(folder: str, step: TreeStep, scaler: Any) -> None:
    """Take up what the file says, if there is one."""
    path = state_file(folder)
    if not path.exists():
        return
    state = json.loads(path.read_text())
    # Budgets and costs count the tokens of all ranks that share a forest's.
    if (state["device_bytes"], state.get("sharing_ranks", 1)) == (device_bytes(), step.context.sharing_ranks):
        step.knowledge.budget.restore(state["budget"])
        # Checkpoints of earlier versions have none.
        if step.knowledge.calls.fit is not None and state.get("costs") is not None:
            step.knowledge.calls.fit.restore(state["costs"])
    if scaler is not None and state["scaler"] is not None:
        scaler.load_state_dict(state["scaler"])
