"""Time and bytes of a plan, in NumPy alone: cost model and fit, memory model, choice, balance over ranks, clusters."""

from tree_rl.cost.cost_model import CostModel, ModelShape

__all__ = ["CostModel", "ModelShape"]
