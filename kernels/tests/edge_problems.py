"""Edges of random hidden states over a small vocabulary, and what their log-probs and entropies weigh in a loss."""

from typing import Any

import torch

from tree_kernels import edge_log_probs, logits_edge_log_probs

TOKENS, HIDDEN = 40, 12


def edge_problem(
    edges: int, vocabulary: int, dtype: torch.dtype, *, seed: int = 0, sources: int = TOKENS, device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """Hidden states, head weight and bias in the dtype; sources, targets, temperatures and weights of the edges."""
    generator = torch.Generator().manual_seed(seed + edges * 1000 + vocabulary)
    exact = dtype if dtype == torch.float64 else torch.float32

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=exact).to(device, dtype)

    def choose(most: int) -> torch.Tensor:
        return torch.randint(0, most, (edges,), generator=generator).to(device)

    return {
        "hidden": draw(TOKENS, HIDDEN),
        "weight": draw(vocabulary, HIDDEN),
        "bias": draw(vocabulary),
        "source": choose(sources),
        "target": choose(vocabulary),
        "temperature": torch.tensor([0.5, 1.0, 2.0], device=device, dtype=exact)[choose(3)],
        "grad_log_prob": draw(edges).to(exact),
        "grad_entropy": draw(edges).to(exact),
    }


def leaves_of(data: dict[str, torch.Tensor], dtype: torch.dtype, *, of_logits: bool = False) -> list[torch.Tensor]:
    """Hidden states, head weight and bias, or else logits, as the problem's dtype holds them."""
    if of_logits:
        hidden, weight = data["hidden"], data["weight"]
        # The CPU's products in half precision are slow.
        exact = torch.promote_types(hidden.dtype, torch.float32)
        return [(hidden.to(exact) @ weight.to(exact).T).detach().to(hidden.dtype).to(dtype).requires_grad_()]
    return [data[name].detach().to(dtype).requires_grad_() for name in ("hidden", "weight", "bias")]


def with_gradients(
    data: dict[str, torch.Tensor], leaves: list[torch.Tensor], values: tuple[torch.Tensor | None, ...]
) -> list[torch.Tensor]:
    """Values, then the gradients of a loss that weighs every edge differently."""
    log_prob, entropy, squared = values
    loss = (log_prob * data["grad_log_prob"]).sum()
    if entropy is not None:
        loss = loss + (entropy * data["grad_entropy"]).sum()
    assert squared is None or not squared.requires_grad
    return [value for value in values if value is not None] + list(torch.autograd.grad(loss, leaves))


def evaluate(
    data: dict[str, torch.Tensor], dtype: torch.dtype, impl: str, *, of_logits: bool = False, **options: Any
) -> list[torch.Tensor]:
    """What an implementation gives, computed in `dtype`."""
    leaves = leaves_of(data, dtype, of_logits=of_logits)
    given = {"impl": impl, "sum_pi_squared": True, **options}
    if of_logits:
        return with_gradients(data, leaves, logits_edge_log_probs(*leaves, data["source"], data["target"], **given))
    values = edge_log_probs(*leaves[:2], data["source"], data["target"], bias=leaves[2], **given)
    return with_gradients(data, leaves, values)
