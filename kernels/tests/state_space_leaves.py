"""Inputs of the recurrence of Mamba 2."""

import torch

NAMES = ("x", "b", "c", "g", "dt", "state")


def leaves_of(
    size: int,
    *,
    groups: int = 2,
    heads: int = 4,
    state: int = 8,
    head_size: int = 6,
    decay: tuple[float, float] = (0.001, 2.0),
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """float64 leaves; -g is drawn log-uniformly between the two decays."""
    draw = torch.Generator().manual_seed(1000 * size + seed)
    shapes = ((size, heads, head_size), (size, groups, state), (size, groups, state), (size, heads), (size, heads))
    values = [torch.randn(shape, dtype=torch.float64, generator=draw) for shape in shapes]
    low, high = decay
    values[3] = -low * (high / low) ** torch.rand(shapes[3], dtype=torch.float64, generator=draw)
    values[4] = torch.rand(shapes[4], dtype=torch.float64, generator=draw)
    values.append(torch.randn(heads, state, head_size, dtype=torch.float64, generator=draw))
    return dict(zip(NAMES, values, strict=True))
