"""One optimisation step over trees, on torch alone: `TreeStep(model, options, group).run(rows, loss)`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tree_rl.training.context import StepContext
    from tree_rl.training.loss.outputs import EdgeOutputs
    from tree_rl.training.options import TreeOptions
    from tree_rl.training.result import StepResult
    from tree_rl.training.rows import Rows
    from tree_rl.training.step import TreeStep

__all__ = ["EdgeOutputs", "Rows", "StepContext", "StepResult", "TreeOptions", "TreeStep"]

_HOME = {
    "EdgeOutputs": "loss.outputs",
    "Rows": "rows",
    "StepContext": "context",
    "StepResult": "result",
    "TreeOptions": "options",
    "TreeStep": "step",
}


def __getattr__(name: str) -> Any:
    """Import on first use: `tree-rl plan` reads the memory model without torch."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
