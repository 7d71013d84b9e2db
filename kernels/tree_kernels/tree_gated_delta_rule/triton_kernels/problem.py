"""Inputs of one call of the Triton kernels and the sizes that all of them share.

Legend: N unique tokens, T tiles, C rows of a tile, Hk key heads, H value heads, K and V state sizes.
"""

from dataclasses import dataclass
from typing import Any

import torch

from tree_kernels.tree_gated_delta_rule.triton_kernels.device_plan import DevicePlan
from tree_kernels.tree_gated_delta_rule.triton_kernels.sizes import Launch, Launches


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Problem:
    """Inputs, contiguous, and how to launch."""

    q: torch.Tensor
    """[N, Hk, K]"""
    k: torch.Tensor
    """[N, Hk, K]"""
    v: torch.Tensor
    """[N, H, V]"""
    g: torch.Tensor
    """[N, H] float32"""
    beta: torch.Tensor
    """[N, H] float32"""
    initial_state: torch.Tensor
    """[H, K, V] float32"""
    plan: DevicePlan
    scale: float
    tile_tokens: int
    launches: Launches
    processors: int
    """programs of a walk that run at once"""

    @property
    def counts(self) -> tuple[int, int]:
        """N and T."""
        return self.v.shape[0], len(self.plan.token)

    @property
    def of_value_heads(self) -> tuple[int, int]:
        """Grid of a program for each tile and value head."""
        return len(self.plan.token), self.v.shape[1]

    @property
    def of_key_heads(self) -> tuple[int, int]:
        """Grid of a program for each tile and key head."""
        return len(self.plan.token), self.k.shape[1]

    def of_tiles(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Unwritten [T, H, ...]."""
        return self.v.new_empty(*self.of_value_heads, *shape, dtype=dtype)

    def walk_launch(self, num_chains: int, few: Launch, many: Launch) -> Launch:
        """The launch for few chains where all programs of a level then run at once, else the one for many."""
        _, heads, values = self.v.shape
        return few if num_chains * heads * (values // few.values) <= self.processors else many

    def constants(self, launch: Launch, kernel: Any) -> dict[str, Any]:
        """Launch options, and those of the compile-time sizes that the kernel takes."""
        (_, key_heads, keys), (_, heads, values) = self.k.shape, self.v.shape
        sizes = {"HEADS": heads, "GROUP": heads // key_heads, "K": keys, "V": values, "C": self.tile_tokens}
        sizes |= {"BK": launch.keys, "BV": launch.values}
        options = {"num_warps": launch.warps, "num_stages": launch.stages}
        return {name: size for name, size in sizes.items() if name in kernel.arg_names} | options


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Decays:
    """Path sums of the gates in tiles, and what follows from them; all float32."""

    path: torch.Tensor
    """[2, T, H, C], high and low part"""
    from_entry: torch.Tensor
    """[T, H, C], from the state that enters the tile to each row"""
    to_exit: torch.Tensor
    """[T, H, C], from each row to the state with which the chain goes on; 0 where it does not"""
    kept: torch.Tensor
    """[T, H], from the state that enters to the one that goes on; 0 where the chain ends"""
