"""Gradients of models with recurrent layers: a forest, whole or in partitions, and its rows run alone in float64."""

from functools import cache, partial
from typing import Any

import numpy as np
import torch
from equal_gradients import assert_equal_gradients
from hybrid_models import HYBRIDS, build, float64_throughout, rows_with_prefix
from partitioned_steps import partitioned_gradients
from recurrent_models import RECURRENT

from tree_rl.models import check_model, use_tree_attention
from tree_rl.training.loss.edges import forest_log_probs
from tree_rl.training.rows_alone import branch_log_probs
from tree_rl.tree.forest import Forest

FLOAT32_TOLERANCE = 2e-5
CPU = torch.device("cpu")
CONFIGS = HYBRIDS | RECURRENT
Gradients = dict[str, torch.Tensor]
Result = tuple[torch.Tensor, Gradients]
"""Log-probs and gradients."""


def gradients(model: Any, log_probs_F: torch.Tensor) -> Result:
    weight_F = torch.from_numpy(np.random.default_rng(1).normal(size=len(log_probs_F)))
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    loss = (log_probs_F * weight_F.to(log_probs_F.dtype)).sum()
    return log_probs_F.detach(), dict(zip(parameters, torch.autograd.grad(loss, parameters.values()), strict=True))


@cache
def stock_rows_in_float64(family: str, prefix: int) -> Result:
    with float64_throughout():
        model = build(CONFIGS[family], torch.float64)
        return gradients(model, branch_log_probs(model, rows_with_prefix(prefix)))


def tree(family: str, prefix: int, dtype: torch.dtype, *, checkpointing: bool = False) -> Result:
    model = build(CONFIGS[family], dtype)
    check_model(model)
    use_tree_attention(model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return gradients(model, forest_log_probs(model, Forest.from_rows(rows_with_prefix(prefix))))


def assert_same(got: Result, expected: Result, tolerance: float) -> None:
    torch.testing.assert_close(got[0].double(), expected[0], rtol=tolerance, atol=tolerance)
    assert_same_gradients(got[1], expected[1], tolerance)


assert_same_gradients = partial(assert_equal_gradients, floor=1e-3)
"""One that nearly vanishes is held against the largest."""


def row_gradients(model: Any, rows: list[Any]) -> Gradients:
    """Of the sum of squared log-probs, every row alone."""
    parameters = dict(model.named_parameters())
    loss = branch_log_probs(model, rows).square().sum()
    gradients = torch.autograd.grad(loss, parameters.values(), allow_unused=True, materialize_grads=True)
    return dict(zip(parameters, gradients, strict=True))


def partitioned(
    model: Any, rows: list[Any], capacity: int, *, offload: bool = False, preview: bool = False
) -> Gradients:
    """The same through one partitioned step."""

    def loss(log_probs_F: torch.Tensor) -> torch.Tensor:
        return log_probs_F.square().sum()

    return partitioned_gradients(model, Forest.from_rows(rows), capacity, loss, preview=preview, relays_on_host=offload)


def assert_partitions_equal_rows(
    config: Any, rows: list[Any], capacity: int, *, checkpointing: bool = False, **options: bool
) -> None:
    """In float64; `options` as in `partitioned`."""
    with float64_throughout():
        model = build(config, torch.float64)
        expected = row_gradients(model, rows)
        use_tree_attention(model)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        assert_same_gradients(partitioned(model, rows, capacity, **options), expected, 1e-10)
