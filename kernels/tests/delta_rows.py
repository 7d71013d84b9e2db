"""The yardstick of the recurrence: every root-to-leaf path run alone, token by token, in the dtype of its inputs."""

from collections.abc import Sequence

import torch
from tree_shapes import chain

SMALL_TILES = (
    ("chain", 1, torch.float32),
    ("comb", 40, torch.float16),
    ("random_trie", 40, torch.float32),
    ("forest", 40, torch.float16),
)
"""Shape, tokens and dtype of forests for tiles of 16 tokens."""
NAMES = ("q", "k", "v", "g", "beta", "initial_state")


def delta_leaves(
    size: int,
    *,
    key_heads: int = 2,
    value_heads: int = 4,
    key_size: int = 8,
    value_size: int = 6,
    decay: tuple[float, float] = (0.001, 2.0),
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """float64 leaves; -g is drawn log-uniformly between the two decays, keys and queries have unit length."""
    draw = torch.Generator().manual_seed(1000 * size + seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=draw)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, dtype=torch.float64, generator=draw)

    low, high = decay
    leaves = {
        "q": torch.nn.functional.normalize(normal(size, key_heads, key_size), dim=-1),
        "k": torch.nn.functional.normalize(normal(size, key_heads, key_size), dim=-1),
        "v": normal(size, value_heads, value_size),
        "g": -low * (high / low) ** uniform(size, value_heads),
        "beta": uniform(size, value_heads),
        "initial_state": normal(value_heads, key_size, value_size),
    }
    return {name: leaf.requires_grad_() for name, leaf in leaves.items()}


def rows_delta_rule(
    leaves: dict[str, torch.Tensor], paths: Sequence[Sequence[int]], scale: float
) -> tuple[list[torch.Tensor], dict[int, torch.Tensor]]:
    """Outputs of each path alone, [L, Hv, V], and the state after every token from the last path through it."""
    group = leaves["v"].shape[1] // leaves["k"].shape[1]
    outputs, states = [], {}
    for path in paths:
        q, k = (leaves[name][path].repeat_interleave(group, dim=1) for name in ("q", "k"))
        v, g, beta = (leaves[name][path] for name in ("v", "g", "beta"))
        state = leaves["initial_state"]
        row = []
        for step, token in enumerate(path):
            state = state * g[step].exp()[:, None, None]
            delta = beta[step][:, None] * (v[step] - (state * k[step][:, :, None]).sum(1))
            state = state + k[step][:, :, None] * delta[:, None, :]
            row.append(scale * (state * q[step][:, :, None]).sum(1))
            states[token] = state
        outputs.append(torch.stack(row))
    return outputs, states


def fork(prefix: int, tails: Sequence[int]) -> list[int]:
    """Parents of a prefix and tails that hang from its last token."""
    parent = chain(prefix)
    for tail in tails:
        parent += [prefix - 1, *range(len(parent), len(parent) + tail - 1)]
    return parent


def chains_from_one_tile() -> list[int]:
    """Parents of branches off both ends and the middle of the same tile, long enough to be chains of their own."""
    parent = fork(16, [18, 18])
    for joint in (3, 7, 7):
        parent += [joint, *range(len(parent), len(parent) + 16)]
    return parent
