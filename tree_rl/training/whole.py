"""A whole forest in one forward: each unique token runs once, its outputs are scattered to the rows (paper, section 3).

Legend: N unique tokens, F flat tokens.
"""

import numpy as np
import torch
from torch import nn

from tree_kernels.host_copy import to_device
from tree_rl.models.tree_inputs import TreeInputs
from tree_rl.training.loss.edges import plan_edges, tree_log_probs
from tree_rl.training.loss.outputs import LOG_PROBS, EdgeOutputs
from tree_rl.tree.forest import Forest


def tree_values(model: nn.Module, forest: Forest, inputs: TreeInputs) -> EdgeOutputs:
    """Value of every flat token, [F], from one forward of a token classifier with a single label."""
    values_N = inputs.of_all(model(**inputs.model_kwargs()).logits[0, :, 0])
    return EdgeOutputs(values=values_N[to_device(forest.row_index.values.astype(np.int64), values_N.device)])


def wanted_everywhere(forest: Forest) -> np.ndarray:
    """bool [F], True at every position with a next token in its row."""
    wanted_F = np.ones(forest.num_flat, dtype=bool)
    wanted_F[forest.row_index.offsets[1:] - 1] = False
    return wanted_F


def forest_log_probs(
    model: nn.Module, forest: Forest, *, temperature: float = 1.0, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Log-prob of every next token of every row, [F] (0 at a row's end): the shortest way to use a tree."""
    temperature_B = np.full(forest.num_rows, temperature, dtype=np.float32)
    edges = plan_edges(forest, wanted_everywhere(forest), temperature_B, device)
    return tree_log_probs(model, TreeInputs.from_forest(forest, device), edges)[LOG_PROBS]
