"""Forward and backward of a batch over trees, on torch alone: `TreeStep(model, options, group).run(rows, loss)`."""

from tree_rl.extras import require_modules

require_modules(__name__, "torch", "transformers")

from tree_rl.training.context import StepContext
from tree_rl.training.hand_overs import StepResult
from tree_rl.training.loss.outputs import EdgeOutputs
from tree_rl.training.rows import Rows
from tree_rl.training.step import TreeStep
from tree_rl.training.tree_options import TreeOptions

__all__ = ["EdgeOutputs", "Rows", "StepContext", "StepResult", "TreeOptions", "TreeStep"]
