"""What a call of a step returns. Legend: F flat tokens, L decoder layers, K experts per token."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tree_rl.training.loss.outputs import EdgeOutputs
from tree_rl.training.loss.rows_loss import Metrics
from tree_rl.training.micro_batch import MicroBatch
from tree_rl.training.routers.expert_load import LoadReport
from tree_rl.training.rows import Rows


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MicroBatchResult:
    """What one micro-batch returns."""

    outputs: EdgeOutputs
    """[f], row after row, without graph."""
    loss: float
    """Loss of the rows; 1 if the call has no loss."""
    metrics: list[Metrics]
    """One entry for each part of the rows that went through the trainer's loss."""
    routes_fLK: torch.Tensor | None = None
    """int16, experts that ran; None if the call did not record them."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepResult:
    """What a call returns: outputs in the order of the rows, and the loss and metrics of each micro-batch."""

    outputs: EdgeOutputs
    """[F] without graph; 0 where nothing was asked for."""
    routes_FLK: torch.Tensor | None
    """int16 [F, L, K], experts that ran; None if the call did not record them."""
    losses: tuple[float, ...]
    """Loss of each micro-batch."""
    metrics: tuple[list[Metrics], ...]
    """Metrics of each micro-batch, one entry for each part of its rows that went through the loss."""
    micro_batches: tuple[MicroBatch, ...]
    """The micro-batches that ran, in order."""
    plan_seconds: float
    """Host time of planning and agreeing."""
    load: LoadReport | None
    """Load of experts; None except for an update with `router_aux_loss_coef`."""


def in_row_order(parts: Sequence[torch.Tensor], batches: Sequence[MicroBatch], rows: Rows) -> torch.Tensor:
    """Values [f, ...] of each micro-batch as [F, ...] in the order of the rows."""
    places = np.concatenate([rows.flat_positions(batch.rows) for batch in batches])
    joined = torch.cat(list(parts))
    ordered = torch.empty_like(joined)
    ordered[torch.from_numpy(places).to(joined.device)] = joined
    return ordered
