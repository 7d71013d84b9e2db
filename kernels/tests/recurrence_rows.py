"""A recurrence over a forest, held against every row run alone: outputs, states at tokens and gradients together."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tree_shapes import paths_of, subtree_end_of

from tree_kernels import TreeLayout

Leaves = dict[str, torch.Tensor]
RowsAlone = Callable[[Leaves, list[list[int]]], tuple[list[torch.Tensor], dict[int, torch.Tensor]]]
"""Outputs of each path, and the state after every token."""


def relative_error(actual: torch.Tensor, expected: torch.Tensor, smallest: float = 1e-3) -> float:
    assert actual.isfinite().all()
    return float((actual.double() - expected).detach().norm() / expected.detach().norm().clamp(min=smallest))


def check_recurrence(
    parent: list[int],
    leaves: Leaves,
    rows_alone: RowsAlone,
    recurrence: Callable[[Leaves, TreeLayout, str], tuple[torch.Tensor, torch.Tensor | None]],
    *,
    impls: Sequence[str],
    dtype: torch.dtype,
    tolerance: float,
    state_tolerance: float | None = None,
    states_at: Sequence[int] = (),
    unused: Sequence[str] = (),
) -> None:
    """Weigh every token of every row at random, and every state asked for; compare values and all gradients.

    Args:
        parent: of each token.
        leaves: float64; either side starts from them as the dtype holds them.
        rows_alone: the yardstick, in float64.
        recurrence: of leaves, a layout and an implementation; outputs, and states where some are asked for.
        impls: to run.
        dtype: of the recurrence.
        tolerance: relative, of outputs and gradients, and of states unless they have one of their own.
        state_tolerance: 0 where states are copies.
        states_at: tokens.
        unused: leaves that the recurrence does not get.
    """
    exact = {name: leaf.detach().to(dtype).double().requires_grad_() for name, leaf in leaves.items()}
    paths = paths_of(parent)
    rows, states = rows_alone(exact, paths)
    draw = torch.Generator().manual_seed(1)
    weights = [torch.randn(row.shape, dtype=torch.float64, generator=draw) for row in rows]
    kept = torch.stack([states[token] for token in states_at]) if states_at else torch.zeros(0)
    loss: Any = sum(((weight * row).sum() for weight, row in zip(weights, rows, strict=True)), kept.square().sum())
    wanted = torch.autograd.grad(loss, list(exact.values()), allow_unused=True, materialize_grads=True)
    layout = TreeLayout.from_subtree_end(subtree_end_of(parent))
    for impl in impls:
        inputs = {name: leaf.detach().to(dtype).requires_grad_() for name, leaf in leaves.items()}
        out, got_states = recurrence(inputs, layout, impl)
        assert out.dtype == dtype and (got_states is None) == (not states_at)
        loss = torch.zeros((), dtype=torch.float64)
        for path, weight, row in zip(paths, weights, rows, strict=True):
            assert relative_error(out[path], row) < tolerance
            loss = loss + (weight * out[path]).sum()
        if got_states is not None:
            assert relative_error(got_states, kept) <= (tolerance if state_tolerance is None else state_tolerance)
            loss = loss + got_states.double().square().sum()
        found = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True, materialize_grads=True)
        for name, actual, expected in zip(leaves, found, wanted, strict=True):
            assert actual.dtype == dtype
            assert name in unused or relative_error(actual, expected) < tolerance, (impl, name)
