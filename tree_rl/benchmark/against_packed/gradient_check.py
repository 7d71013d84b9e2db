"""Gradients of trees and packed rows against packed rows in higher precision."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from tree_rl.benchmark.against_packed.random_model import has_experts, in_higher_precision
from tree_rl.benchmark.against_packed.update import Planner, clipped_loss, log_probs
from tree_rl.benchmark.batch import Batch
from tree_rl.benchmark.gradient_errors import GradientErrors, relative_error
from tree_rl.models.routers.trace import KEYWORD, RouterTrace


def check_gradients(model: Any, batch: Batch, tree: Planner, packed: Planner) -> GradientErrors:
    """Measure both errors on one batch; raises a GateError if the tree is further off than the packed rows.

    Rows round each repetition of a token separately, and the mean of these errors can be smaller than the tree's single
    one. A tree may therefore also be as far off as rows that share no prefix.

    A copy of the model in higher precision must fit beside it. Gradients of the model are cleared.
    """
    tree_error, rows_error = _errors(model, batch, tree, packed)
    errors = GradientErrors(tree=tree_error, rows=rows_error)
    if tree_error > errors.limit:
        (apart,) = _errors(model, batch.apart(), packed)
        errors = replace(errors, rows_apart=apart)
    return errors.require_exact("packed rows")


def _errors(model: Any, batch: Batch, *planners: Planner) -> list[float]:
    truth = _gradients(in_higher_precision(model), batch, planners[-1])
    return [relative_error(_gradients(model, batch, planner), truth) for planner in planners]


def _gradients(model: Any, batch: Batch, planner: Planner) -> list[torch.Tensor]:
    model.zero_grad()
    with _routed_by_token(model):
        for forward in planner(batch):
            log_probs_F = log_probs(model, forward)
            clipped_loss(log_probs_F, log_probs_F.detach(), forward.advantages(), batch.num_trained).backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return gradients


@contextmanager
def _routed_by_token(model: Any) -> Iterator[None]:
    """In a model with experts, choose them by token id.

    Near a tie two kernels or two precisions choose different experts, which says nothing about trees.
    """
    if not has_experts(model):
        yield
        return
    config = model.config
    draw = torch.Generator().manual_seed(0)
    experts = getattr(config, "num_local_experts", None) or config.n_routed_experts
    order = torch.rand(config.vocab_size, config.num_hidden_layers, experts, generator=draw)
    table = order.topk(config.num_experts_per_tok).indices.to(torch.int16).to(model.device)

    def route(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {**kwargs, KEYWORD: RouterTrace(table[kwargs["input_ids"][0]])}

    handle = model.register_forward_pre_hook(route, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
