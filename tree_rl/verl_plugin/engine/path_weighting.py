"""Opt-in path weights around verl's unchanged losses (paper, "Derivation": lambda_t from any path weights w_k)."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from tree_rl.verl_plugin.compat import append_to_dict
from tree_rl.verl_plugin.compat import tensordict_utils as tu
from tree_rl.verl_plugin.engine.micro_batches import MicroBatch

LossFunction = Callable[..., tuple[torch.Tensor, dict[str, Any]]]


def weigh(loss_function: LossFunction, micro_batch: MicroBatch) -> LossFunction:
    """verl's loss with the micro-batch's path weights; the loss itself where every row weighs the same.

    Rows of one weight go through the loss together and their loss is scaled, so any loss keeps its meaning. Weights of
    single tokens scale the gradient that reaches a log-prob; the reported loss is then verl's own, unweighted.
    """
    if micro_batch.row_weight_B is not None:
        return _RowWeighted(loss_function, micro_batch.row_weight_B)
    if micro_batch.edge_weight_F is not None:
        return _EdgeWeighted(loss_function, micro_batch.edge_weight_F)
    return loss_function


def unweighted(loss_function: LossFunction) -> LossFunction:
    """The loss inside `weigh`."""
    return loss_function.loss_function if isinstance(loss_function, _RowWeighted | _EdgeWeighted) else loss_function


class _RowWeighted:
    def __init__(self, loss_function: LossFunction, weight_B: np.ndarray) -> None:
        self.loss_function = loss_function
        self.weight_B = weight_B

    def __call__(
        self, *, model_output: dict[str, torch.Tensor], data: TensorDict, **kwargs: Any
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        losses: list[torch.Tensor] = []
        metrics: dict[str, Any] = {}
        for weight in np.unique(self.weight_B):
            members = np.flatnonzero(self.weight_B == weight).tolist()
            part_output = {key: _select(value, members) for key, value in model_output.items()}
            part_data = tu.index_select_tensor_dict(data, members)
            loss, part_metrics = self.loss_function(model_output=part_output, data=part_data, **kwargs)
            losses.append(float(weight) * loss)
            append_to_dict(metrics, part_metrics)
        return torch.stack(losses).sum(), metrics


class _EdgeWeighted:
    def __init__(self, loss_function: LossFunction, weight_F: np.ndarray) -> None:
        self.loss_function = loss_function
        self.weight_F = weight_F

    def __call__(
        self, *, model_output: dict[str, torch.Tensor], data: TensorDict, **kwargs: Any
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        scaled = {key: _scale_gradient(value, self.weight_F) for key, value in model_output.items()}
        return self.loss_function(model_output=scaled, data=data, **kwargs)


class _ScaleGradient(torch.autograd.Function):
    """Identity whose backward multiplies by a constant."""

    @staticmethod
    def forward(ctx: Any, values_F: torch.Tensor, weight_F: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight_F)
        return values_F.view_as(values_F)

    @staticmethod
    def backward(ctx: Any, gradient_F: torch.Tensor) -> tuple[torch.Tensor, None]:
        (weight_F,) = ctx.saved_tensors
        return gradient_F * weight_F, None


def _scale_gradient(nested: torch.Tensor, weight_F: np.ndarray) -> torch.Tensor:
    values_F = nested.values()
    weight = torch.from_numpy(weight_F).to(values_F)
    return torch.nested.nested_tensor_from_jagged(_ScaleGradient.apply(values_F, weight), nested.offsets())  # type: ignore[attr-defined]


def _select(nested: torch.Tensor, members: list[int]) -> torch.Tensor:
    rows = nested.unbind()
    picked = [rows[row] for row in members]
    offsets = torch.tensor([0, *np.cumsum([len(row) for row in picked]).tolist()], device=nested.device)
    return torch.nested.nested_tensor_from_jagged(torch.cat(picked), offsets)
