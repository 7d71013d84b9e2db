"""Edges of random hidden states over a small vocabulary, and what their log-probs and entropies weigh in a loss."""

import torch

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
