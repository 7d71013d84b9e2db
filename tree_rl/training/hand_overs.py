"""What plan, run and learn hand to each other in a call of a step, and its result.

Legend: f flat tokens of a micro-batch, F of the call, L decoder layers, K experts per token.
"""

from collections.abc import Generator
from dataclasses import dataclass

import torch

from tree_rl.training.context import StepCall
from tree_rl.training.loss.outputs import EdgeOutputs, Metrics
from tree_rl.training.measured_calls import Stamp
from tree_rl.training.micro_batch import MicroBatch
from tree_rl.training.routers.expert_load import LoadReport


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepPlan:
    """A call that all ranks have agreed to run."""

    call: StepCall
    max_tokens: int
    """Most unique tokens of a forward."""
    max_flat_tokens: int
    """Most tokens of rows that run without a tree."""
    batches: tuple[MicroBatch, ...]
    """This rank's micro-batches, in the order in which they run."""
    known: tuple[torch.Tensor | None, ...]
    """[f] for each micro-batch: its rows' log-probs from an inference with the current weights, for a forest in
    partitions whose loss couples tokens; else None."""
    schedule: str
    """Forwards and backwards that all ranks follow."""
    may_repeat: bool
    """True if every rank can run the call again from the start after running out of memory."""
    seconds: float
    """Host time of planning and agreeing."""


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


Work = Generator[str, None, MicroBatchResult]
"""Ops of a micro-batch: yields the kind of each before it runs, returns the result."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlanRun:
    """Results and times of a plan that ran."""

    results: tuple[MicroBatchResult, ...]
    """One for each micro-batch, in order."""
    dummy_ops: int
    """Number of one-token forwards that kept this rank in lock-step."""
    start: Stamp
    """Start of the first op."""
    end: Stamp
    """End of the last op."""


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
