"""Nothing is timed before both sides have shown the same gradients: a float32 run of the rows is the yardstick."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from tree_rl.benchmark.batch import Batch
from tree_rl.benchmark.models import has_experts, in_higher_precision
from tree_rl.benchmark.update import Planner, clipped_loss, log_probs
from tree_rl.models.routers.trace import KEYWORD, RouterTrace

NOISE = 1.1
"""Two runs that round alike differ this much in their error at most; the tree may be no further off than that."""
FLOAT32_LIMIT = 1e-5
"""Relative error of a float32 gradient that counts as rounding, whatever the packed rows reach."""


class GateError(RuntimeError):
    """The tree's gradient is further from the yardstick than the packed rows' gradient: no time would mean anything."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gradients:
    """Relative norms of the errors of both gradients, over all parameters."""

    tree: float
    packed: float

    @property
    def limit(self) -> float:
        """The largest error that passes."""
        return max(NOISE * self.packed, FLOAT32_LIMIT)


def check_gradients(model: Any, batch: Batch, tree: Planner, packed: Planner) -> Gradients:
    """Compare the gradients of one batch with those of the packed rows in higher precision.

    Args:
        model: from `build_model`; its gradients are cleared.
        batch: small: a copy of the model in higher precision must fit beside it.
        tree: plans trees.
        packed: plans packed rows.

    Returns:
        Both errors.

    Raises:
        GateError: the tree is further off than the packed rows.
    """
    truth = _gradients(in_higher_precision(model), batch, packed)
    errors = Gradients(
        tree=_relative_error(_gradients(model, batch, tree), truth),
        packed=_relative_error(_gradients(model, batch, packed), truth),
    )
    model.zero_grad()
    if not errors.tree <= errors.limit:
        raise GateError(
            f"gradient of the tree: expected a relative error of at most {errors.limit:.3g}, received "
            f"{errors.tree:.3g} (packed rows: {errors.packed:.3g}); try another --tree-attention, and report it with "
            "the output of tree-rl doctor"
        )
    return errors


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
    """Experts chosen by token id where a model has experts.

    A router's top-k is a step: near a tie half precision and the yardstick choose differently, and so do any two
    kernels, which would say nothing about trees.
    """
    if not has_experts(model):
        yield
        return
    config = model.config
    draw = torch.Generator().manual_seed(0)
    order = torch.rand(config.vocab_size, config.num_hidden_layers, config.num_experts, generator=draw)
    table = order.topk(config.num_experts_per_tok).indices.to(torch.int16).to(model.device)

    def route(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {**kwargs, KEYWORD: RouterTrace(table[kwargs["input_ids"][0]])}

    handle = model.register_forward_pre_hook(route, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _relative_error(got: list[torch.Tensor], truth: list[torch.Tensor]) -> float:
    difference = torch.stack([(g.to(t.dtype) - t).square().sum() for g, t in zip(got, truth, strict=True)]).sum()
    return float((difference / torch.stack([t.square().sum() for t in truth]).sum()).sqrt())
