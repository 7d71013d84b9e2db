"""A whole forest in one forward: every unique token once, its outputs scattered back to rows (paper, section 3).

The rows' own loss follows, so its gradient is that of the rows run alone. Legend: N unique tokens, F flat tokens.
"""

import functools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from tree_kernels.host_copy import to_device
from tree_rl.models.edge_head import EdgeRequest, edge_values
from tree_rl.models.tree_inputs import ModelInputs, TreeInputs
from tree_rl.training.loss.edges import EdgePlan, plan_edges, scatter
from tree_rl.training.loss.outputs import LOG_PROBS, EdgeOutputs, Wanted
from tree_rl.tree.forest import Forest

LateEdges = Callable[[], EdgePlan]
"""Plans edges when the head asks for them."""


def tree_log_probs(
    model: nn.Module, inputs: ModelInputs, edges: EdgePlan | LateEdges, *, extras: Wanted = ()
) -> EdgeOutputs:
    """Log-probs, and other outputs, of all wanted edges of a forest, from one forward.

    Args:
        model: causal language model prepared by `use_tree_attention` and, to save memory, `use_edge_head`; wrapped or
            not.
        inputs: the forest, or whatever else the model reads.
        edges: from `plan_edges` on the same forest with the same ranks, or what calls it; then the GPU computes the
            layers meanwhile.
        extras: outputs beside log-probs, `entropy` and `sum_pi_squared`.

    Returns:
        [F] each; only rows of `source_R` were projected to the vocabulary.
    """
    plan = functools.cache((lambda: edges) if isinstance(edges, EdgePlan) else edges)

    def request() -> EdgeRequest:
        return replace(plan().request, extras=extras)

    per_edge = edge_values(model, inputs.model_kwargs(), request() if isinstance(edges, EdgePlan) else request)
    return EdgeOutputs.of_edges(per_edge).map(lambda value_e: scatter(plan().of_all(value_e), plan().reads))


def tree_values(model: nn.Module, forest: Forest, inputs: TreeInputs) -> EdgeOutputs:
    """Value of every flat token, [F], from one forward of a token classifier with one label."""
    values_N = inputs.of_all(model(**inputs.model_kwargs()).logits[0, :, 0])
    return EdgeOutputs(values=values_N[to_device(forest.row_index.values.astype(np.int64), values_N.device)])


def wanted_everywhere(forest: Forest) -> np.ndarray:
    """bool [F]: every position that has a next token in its row."""
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
