"""Inputs of one call of the Triton kernels and sizes that the kernels share.

Legend: N unique tokens, T tiles, C rows of a tile, Hk key heads, H value heads, K and V state sizes.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from tree_kernels.tree_gated_delta_rule.triton_kernels.device_plan import DevicePlan
from tree_kernels.tree_gated_delta_rule.triton_kernels.sizes import (
    Launch,
    Launches,
    launches_for,
    processors_of,
    shared_memory_of,
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Problem:
    """Contiguous inputs and launch options."""

    q: torch.Tensor
    """[N, Hk, K]."""
    k: torch.Tensor
    """[N, Hk, K]."""
    v: torch.Tensor
    """[N, H, V]."""
    g: torch.Tensor
    """[N, H] float32."""
    beta: torch.Tensor
    """[N, H] float32."""
    initial_state: torch.Tensor
    """[H, K, V] float32."""
    plan: DevicePlan
    scale: float
    tile_tokens: int
    launches: Launches
    processors: int
    """Programs of a walk that run in parallel."""
    corrects: bool = True
    """True for the delta rule, whose writes depend on the state; False for Mamba 2, whose `beta` is the time step."""

    @classmethod
    def of(cls, tensors: Iterable[torch.Tensor], plan: DevicePlan, tile_tokens: int, **more: Any) -> "Problem":
        """Of q, k, v, g, beta and the initial state, with the launches of their dtype, sizes and device."""
        q, k, v, g, beta, initial_state = (t.contiguous() for t in tensors)
        return cls(
            q=q,
            k=k,
            v=v,
            g=g,
            beta=beta,
            initial_state=initial_state,
            plan=plan,
            tile_tokens=tile_tokens,
            launches=launches_for(v.dtype, k.shape[2], v.shape[2], shared_memory_of(v.device)),
            processors=processors_of(v.device),
            **more,
        )

    @property
    def counts(self) -> tuple[int, int]:
        """N and T."""
        return self.v.shape[0], len(self.plan.token)

    @property
    def of_value_heads(self) -> tuple[int, int]:
        """Grid with one program per tile and value head."""
        return len(self.plan.token), self.v.shape[1]

    @property
    def of_key_heads(self) -> tuple[int, int]:
        """Grid with one program per tile and key head."""
        return len(self.plan.token), self.k.shape[1]

    def of_tiles(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Uninitialised [T, H, ...]."""
        return self.v.new_empty(*self.of_value_heads, *shape, dtype=dtype)

    def walk_launch(self, num_chains: int, few: Launch, many: Launch) -> Launch:
        """`few` if all programs of a level then run in parallel, else `many`."""
        _, heads, values = self.v.shape
        return few if num_chains * heads * (values // few.values) <= self.processors else many

    def constants(self, launch: Launch, kernel: Any) -> dict[str, Any]:
        """Launch options and the compile-time sizes that the kernel takes."""
        (_, key_heads, keys), (_, heads, values) = self.k.shape, self.v.shape
        sizes = {"HEADS": heads, "GROUP": heads // key_heads, "K": keys, "V": values, "C": self.tile_tokens}
        sizes |= {"BK": launch.keys, "BV": launch.values, "CORRECTS": self.corrects}
        options = {"num_warps": launch.warps, "num_stages": launch.stages}
        return {name: size for name, size in sizes.items() if name in kernel.arg_names} | options


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Decays:
    """Path sums of the gates in tiles, and decays; all float32."""

    path: torch.Tensor
    """[2, T, H, C], path sums as a high and a low part."""
    from_entry: torch.Tensor
    """[T, H, C], decay from the entry state to each row."""
    to_exit: torch.Tensor
    """[T, H, C], decay from each row to the state that continues the chain; 0 without one."""
    kept: torch.Tensor
    """[T, H], decay from the entry state to the state that continues the chain; 0 without one."""

    @classmethod
    def empty(cls, problem: Problem) -> "Decays":
        """Uninitialised decays."""
        tile = problem.tile_tokens
        return cls(
            path=problem.g.new_empty(2, *problem.of_value_heads, tile),
            from_entry=problem.of_tiles(tile, dtype=torch.float32),
            to_exit=problem.of_tiles(tile, dtype=torch.float32),
            kept=problem.of_tiles(dtype=torch.float32),
        )
