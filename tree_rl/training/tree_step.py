"""Forward of a whole forest: every unique token once, its outputs scattered back to rows (paper, section 3).

The rows' own loss follows, so its gradient is that of the rows run alone. Legend: N unique tokens, F flat tokens.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import nn

from tree_kernels.host_copy import to_device, to_device_together
from tree_kernels.layout import TreeLayout
from tree_rl.models.attention import skip_mask
from tree_rl.models.edge_head import EdgeRequest, edge_values
from tree_rl.models.routers.trace import KEYWORD, RouterTrace
from tree_rl.training.edges import EdgePlan, plan_edges, scatter
from tree_rl.tree.attention_blocks import count_attention_blocks
from tree_rl.tree.forest import Forest

LateEdges = Callable[[], EdgePlan]
"""Plans edges when the head asks for them."""


class ModelInputs(Protocol):
    """Tokens on the device together with how the model reads them."""

    def model_kwargs(self) -> dict[str, object]:
        """Keyword arguments of the model's forward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeInputs:
    """One forest on the device, as the model reads it."""

    input_ids_1N: torch.Tensor
    """int64 [1, N], DFS order."""
    position_ids_1N: torch.Tensor
    """int64 [1, N], depth on the path: siblings share positions."""
    layout: TreeLayout
    """The attention mask of the forest."""
    router_trace: RouterTrace | None = None
    """Carried to the routers of a model with `RouterHooks`; None leaves them alone."""

    @classmethod
    def from_forest(
        cls, forest: Forest, device: torch.device | str = "cpu", *, router_trace: RouterTrace | None = None
    ) -> "TreeInputs":
        """Move a forest to `device`."""
        planned = cls.of_plan(forest.input_ids, forest.position, forest.subtree_end, device)
        return planned if router_trace is None else replace(planned, router_trace=router_trace)

    @classmethod
    def of_plan(
        cls,
        input_ids: np.ndarray,
        position: np.ndarray,
        subtree_end: np.ndarray,
        device: torch.device | str,
        *,
        past_length: int = 0,
    ) -> "TreeInputs":
        """Move a planned forest, or a partition of one, to `device`; a plan needs no check.

        Args:
            input_ids: integer [N], DFS order.
            position: integer [N], depth on the whole path, the past included.
            subtree_end: int32 [N], inside this forest or partition.
            device: where it goes, by one copy behind which the host goes on.
            past_length: P, ancestors in front of a partition.
        """
        end = subtree_end.astype(np.int32, copy=False)
        arrays: list[np.ndarray] = [
            input_ids.astype(np.int64),
            position.astype(np.int64),
            (position - past_length).astype(np.int32),
            end,
        ]
        ids, positions, local, end_on_device = to_device_together(arrays, device)
        # Counted on the host: a count on the device would wait for it.
        share = count_attention_blocks(end, past_length=past_length).partial_share
        layout = TreeLayout(end_on_device, local, past_length, share, end)
        return cls(input_ids_1N=ids.unsqueeze(0), position_ids_1N=positions.unsqueeze(0), layout=layout)

    def model_kwargs(self) -> dict[str, object]:
        """Keyword arguments of a Hugging Face model prepared by `use_tree_attention`."""
        routers = {} if self.router_trace is None else {KEYWORD: self.router_trace}
        return {
            "input_ids": self.input_ids_1N,
            "position_ids": self.position_ids_1N,
            "attention_mask": skip_mask(self.input_ids_1N.device),
            "tree_layout": self.layout,
            "use_cache": False,
            **routers,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatOutputs:
    """What the rows' loss reads, one value per flat token; 0 where no edge was asked for."""

    log_probs_F: torch.Tensor
    """[F], log-prob of the next token of the row."""
    entropy_F: torch.Tensor | None
    """[F], entropy of the distribution of the next token; None if not asked for."""
    sum_pi_squared_F: torch.Tensor | None
    """[F], sum of squared probabilities; None if not asked for."""


def tree_log_probs(
    model: nn.Module,
    inputs: ModelInputs,
    edges: EdgePlan | LateEdges,
    *,
    entropy: bool = False,
    sum_pi_squared: bool = False,
) -> FlatOutputs:
    """Log-probs (and entropies) of all wanted edges of a forest, from one forward.

    Args:
        model: causal language model prepared by `use_tree_attention` and, to save memory, `use_edge_head`; wrapped or
            not.
        inputs: the forest, or whatever else the model reads.
        edges: from `plan_edges` on the same forest, or what calls it; then the GPU computes the layers meanwhile.
        entropy: also return entropies.
        sum_pi_squared: also return the sum of squared probabilities.

    Returns:
        Values over flat tokens; only rows of `source_R` were projected to the vocabulary.
    """
    plan = functools.cache((lambda: edges) if isinstance(edges, EdgePlan) else edges)

    def request() -> EdgeRequest:
        return replace(plan().request, entropy=entropy, sum_pi_squared=sum_pi_squared)

    per_edge = edge_values(model, inputs.model_kwargs(), request() if isinstance(edges, EdgePlan) else request)
    log_probs_F, entropy_F, squared_F = (
        None if values_E is None else scatter(values_E, plan().reads) for values_E in per_edge
    )
    assert log_probs_F is not None
    return FlatOutputs(log_probs_F=log_probs_F, entropy_F=entropy_F, sum_pi_squared_F=squared_F)


def tree_values(model: nn.Module, forest: Forest, inputs: TreeInputs) -> torch.Tensor:
    """Value of every flat token, [F], from one forward of a token classifier with one label."""
    values_N = model(**inputs.model_kwargs()).logits[0, :, 0]
    return values_N[to_device(forest.row_index.values.astype(np.int64), values_N.device)]


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
    return tree_log_probs(model, TreeInputs.from_forest(forest, device), edges).log_probs_F
