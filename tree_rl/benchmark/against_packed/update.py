"""A whole PPO update over trees or packed rows: old log-probs, forward, backward, optimizer.

Legend: F flat tokens of a forward, B rows.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from tree_kernels.host_copy import to_device
from tree_rl.benchmark.against_packed.packed_rows import PackedInputs, plan_packed_edges
from tree_rl.benchmark.batch import Batch
from tree_rl.benchmark.phases import BACKWARD, FORWARD, OLD_LOG_PROBS, OPTIMIZER, PLAN, Stopwatch, UpdateTimes
from tree_rl.models.tree_inputs import ModelInputs, TreeInputs
from tree_rl.training.loss.edges import EdgePlan, plan_edges, tree_log_probs
from tree_rl.training.loss.outputs import LOG_PROBS
from tree_rl.tree import Forest, pack_groups
from tree_rl.tree.packing import fill_bins

PACKED = "packed"
CLIP = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardPlan:
    """One forward and what its loss needs, on the device.

    The host calls `edges` and `advantages` while the device computes the layers.
    """

    rows: tuple[int, ...]
    """Rows of the batch, in the order of the flat tokens."""
    inputs: ModelInputs
    """What the model reads."""
    edges: Callable[[], EdgePlan]
    """Plans the log-probs to compute, once."""
    advantages: Callable[[], torch.Tensor]
    """Makes float32 [F]: the row's advantage where the next token is trained, else 0."""


Planner = Callable[[Batch], Iterator[ForwardPlan]]
"""Plans the forwards of a batch, each while the device computes the one before."""


def tree_planner(max_tokens: int, device: torch.device) -> Planner:
    """Whole groups as trees, at most `max_tokens` unique tokens a forward."""

    def plan(batch: Batch) -> Iterator[ForwardPlan]:
        forest = batch.forest()
        for packed in pack_groups(forest, batch.rows_of_groups(), max_tokens=max_tokens):
            rows = packed.tolist()
            part = forest.select_rows(rows)
            yield ForwardPlan(
                rows=tuple(rows),
                inputs=TreeInputs.from_forest(part, device),
                edges=cache(partial(_tree_edges, batch, rows, part, device)),
                advantages=partial(_advantages, batch, rows, device),
            )

    return plan


def packed_planner(max_tokens: int, device: torch.device) -> Planner:
    """Rows end to end, at most `max_tokens` tokens a forward, a longer row alone; log-probs of trained tokens only."""

    def plan(batch: Batch) -> Iterator[ForwardPlan]:
        for content in fill_bins([len(row) for row in batch.rows], max_tokens):
            chosen = sorted(content)
            yield ForwardPlan(
                rows=tuple(chosen),
                inputs=PackedInputs.from_rows([batch.rows[index] for index in chosen], device),
                edges=cache(partial(_packed_edges, batch, chosen, device)),
                advantages=partial(_advantages, batch, chosen, device),
            )

    return plan


def update(model: Any, optimizer: torch.optim.Optimizer, batch: Batch, planner: Planner) -> UpdateTimes:
    """One optimizer step on a batch, timed; gradients of the model are cleared at the end."""
    clock = Stopwatch(next(model.parameters()).device)
    forwards: list[tuple[ForwardPlan, torch.Tensor]] = []
    plans = planner(batch)
    while True:
        with clock.phase(PLAN):
            forward = next(plans, None)
        if forward is None:
            break
        with clock.phase(OLD_LOG_PROBS), torch.no_grad():
            forwards.append((forward, log_probs(model, forward)))
    for forward, old_log_probs_F in forwards:
        with clock.phase(FORWARD):
            loss = clipped_loss(log_probs(model, forward), old_log_probs_F, forward.advantages(), batch.num_trained)
        with clock.phase(BACKWARD):
            loss.backward()
    with clock.phase(OPTIMIZER):
        optimizer.step()
        optimizer.zero_grad()
    return clock.stop()


def log_probs(model: Any, forward: ForwardPlan) -> torch.Tensor:
    """Log-prob of the next token of every flat token that was asked for, [F]; 0 elsewhere."""
    return tree_log_probs(model, forward.inputs, forward.edges)[LOG_PROBS]


def clipped_loss(
    log_probs_F: torch.Tensor, old_log_probs_F: torch.Tensor, advantage_F: torch.Tensor, num_trained: int
) -> torch.Tensor:
    """PPO's clipped objective, averaged over the trained tokens of the whole batch."""
    ratio_F = (log_probs_F - old_log_probs_F).exp()
    gain_F = torch.minimum(ratio_F * advantage_F, ratio_F.clamp(1 - CLIP, 1 + CLIP) * advantage_F)
    return -gain_F.sum() / num_trained


def _predicts_trained(batch: Batch, rows: Sequence[int]) -> np.ndarray:
    """bool [F], positions whose next token is trained."""
    return np.concatenate([np.append(batch.trained[row][1:], False) for row in rows])


def _tree_edges(batch: Batch, rows: Sequence[int], forest: Forest, device: torch.device) -> EdgePlan:
    return plan_edges(forest, _predicts_trained(batch, rows), np.ones(len(rows), dtype=np.float32), device)


def _packed_edges(batch: Batch, chosen: Sequence[int], device: torch.device) -> EdgePlan:
    return plan_packed_edges([batch.rows[index] for index in chosen], _predicts_trained(batch, chosen), device)


def _advantages(batch: Batch, rows: Sequence[int], device: torch.device) -> torch.Tensor:
    trained_F = _predicts_trained(batch, rows)
    lengths = [len(batch.rows[row]) for row in rows]
    advantage_F = np.repeat(batch.advantage_B[list(rows)], lengths)
    return to_device(np.where(trained_F, advantage_F, 0).astype(np.float32), device)
