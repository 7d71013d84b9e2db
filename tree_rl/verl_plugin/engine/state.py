"""What an engine learns while it trains and verl does not save: the budget of `tree.max_tokens: auto`, a loss scale.

One small file per rank beside verl's own; without it, as with another number of ranks, the engine learns anew.
"""

import json
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed

from tree_rl.verl_plugin.engine.auto_budget import AutoBudget


class LearningEngine(Protocol):
    """The parts of an engine that learn."""

    auto_budget: AutoBudget
    scaler: Any
    """verl's gradient scaler of float16 training, or None."""


def state_file(folder: str) -> Path:
    """This rank's file in an engine's checkpoint."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return Path(folder, f"tree_engine_world_size_{ranks}_rank_{rank}.json")


def device_bytes() -> int:
    """Memory of this rank's GPU; 0 without one. A budget learnt for one size is not one for another."""
    if not torch.cuda.is_available():
        return 0
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory


def save_engine_state(engine: LearningEngine, folder: str) -> None:
    """Write the file.

    Args:
        engine: of this rank.
        folder: of its checkpoint; exists.
    """
    scaler = None if engine.scaler is None else engine.scaler.state_dict()
    state = {"device_bytes": device_bytes(), "budget": engine.auto_budget.state(), "scaler": scaler}
    state_file(folder).write_text(json.dumps(state))


def load_engine_state(engine: LearningEngine, folder: str) -> None:
    """Take up what the file says, if there is one."""
    path = state_file(folder)
    if not path.exists():
        return
    state = json.loads(path.read_text())
    if state["device_bytes"] == device_bytes():
        engine.auto_budget.restore(state["budget"])
    if engine.scaler is not None and state["scaler"] is not None:
        engine.scaler.load_state_dict(state["scaler"])
