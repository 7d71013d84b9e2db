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

from tree_kernels.host_copy import to_device
from tree_kernels.layout import TreeLayout
from tree_rl.models.attention import skip_mask
from tree_rl.models.edge_head import EdgeRequest, edge_values
from tree_rl.models.router_trace import KEYWORD, RouterTrace
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

        def tensor(array: np.ndarray) -> torch.Tensor:
            return to_device(array.astype(np.int64), device)

        return cls(
            input_ids_1N=tensor(forest.input_ids).unsqueeze(0),
            position_ids_1N=tensor(forest.position).unsqueeze(0),
            layout=planned_layout(forest.subtree_end, device),
            router_trace=router_trace,
        )

    def model_kwargs(self) -> dict[str, object]:
        """Keyword arguments of a Hugging Face model prepared by `use_tree_attention`."""
        kwargs = tree_kwargs(self.input_ids_1N, self.position_ids_1N, self.layout)
        return kwargs if self.router_trace is None else {**kwargs, KEYWORD: self.router_trace}


def planned_layout(subtree_end: np.ndarray, device: torch.device | str, *, past_length: int = 0) -> TreeLayout:
    """The mask of a forest or a partition that was planned, with what the host knows about its attention."""
    share = count_attention_blocks(subtree_end, past_length=past_length).partial_share
    # Moved first: a forest that was planned needs no check, which only data on the host gets.
    return TreeLayout.from_subtree_end(
        to_device(subtree_end, device),
        past_length=past_length,
        partial_share=share,
        on_host=subtree_end,
    )


def tree_kwargs(input_ids_1N: torch.Tensor, position_ids_1N: torch.Tensor, layout: TreeLayout) -> dict[str, object]:
    """How a model prepared by `use_tree_attention` is called, for a whole forest as for a partition of one."""
    return {
        "input_ids": input_ids_1N,
        "position_ids": position_ids_1N,
        "attention_mask": skip_mask(input_ids_1N.device),
        "tree_layout": layout,
        "use_cache": False,
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
