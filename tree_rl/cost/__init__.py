"""Predicted time and memory of a plan, and balance over ranks. Needs NumPy only."""

from tree_rl.cost.cost_model import CostModel, ModelShape

__all__ = ["CostModel", "ModelShape"]
