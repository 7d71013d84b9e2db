"""Gradients of a tree against those of rows, parameter by parameter."""

from typing import Any

import numpy as np
import torch

Run = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""Log-probs and gradients."""


def gradients(model: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of each trained parameter, by name; zeros where the loss does not reach it."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(trained, found, strict=True))


def with_gradients(model: torch.nn.Module, log_probs_F: torch.Tensor) -> Run:
    """Of a sum that weighs every log-prob at random."""
    weight_F = torch.from_numpy(np.random.default_rng(1).normal(size=len(log_probs_F)))
    return log_probs_F.detach(), gradients(model, (log_probs_F * weight_F.to(log_probs_F.dtype)).sum())


def assert_equal_gradients(
    got: Any, expected: Any, tolerance: float = 1e-5, *, floor: float = 1e-2, slack: float = 1.0
) -> None:
    """Relative norm of each, by name or in a list. One below `floor` of the largest cancels terms: it may be off by
    `slack` times what one at the floor may be."""
    assert len(got) == len(expected)
    names = expected if isinstance(expected, dict) else range(len(expected))
    norms = {name: float(expected[name].norm()) for name in names}
    # Log-probs are of order one, and so are the errors of their rounding: what nearly vanishes has no digits left.
    largest = max(1e-6, *norms.values())
    for name, norm in norms.items():
        error = float((got[name] - expected[name]).norm())
        allowed = tolerance * (norm if norm >= floor * largest else slack * floor * largest)
        assert error <= allowed, f"{name}: error {error:.2e}, norm {norm:.2e}, largest {largest:.2e}"
