"""TreeLayout: the structure of a forest for the kernels, from one int32 vector.

In DFS order, token i sees token j iff j <= i < subtree_end[j]; every token also sees the whole past.
Legend: N unique tokens, P past tokens.
"""

import functools
from collections.abc import Callable, Hashable
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch

from tree_kernels.host_copy import moved

Options = ParamSpec("Options")
Made = TypeVar("Made")


class TreeLayout:
    """Mask and depths of one forest, built once per plan and shared by all layers.

    It is not a pytree on purpose, so that FSDP2 and activation checkpointing pass it by reference. Plans of the
    implementations are built at first use and cached (`metadata`).

    Attributes:
        subtree_end: int32 [N], first DFS index past the subtree of each token.
        position: int32 [N], depth of each token inside the forest (0 at a root); its depth on the whole path is
            `past_length + position`.
        past_length: P, number of ancestor tokens before the forest, visible to every token.
        partial_share: share of the visited blocks of 128 x 128 tokens that are partly visible, counted by the planner;
            None if not counted.
        on_host: int32 [N], `subtree_end` in host memory; None if only the device has it.
    """

    def __init__(
        self,
        subtree_end: torch.Tensor,
        position: torch.Tensor,
        past_length: int,
        partial_share: float | None = None,
        on_host: np.ndarray | None = None,
    ) -> None:
        self.subtree_end = subtree_end
        self.position = position
        self.past_length = past_length
        self.partial_share = partial_share
        self.on_host = on_host
        self._metadata: dict[Hashable, Any] = {}

    @classmethod
    def from_subtree_end(
        cls,
        subtree_end: torch.Tensor,
        *,
        past_length: int = 0,
        partial_share: float | None = None,
        on_host: np.ndarray | None = None,
    ) -> "TreeLayout":
        """Build the layout of a forest.

        Data on the CPU is checked; data on an accelerator is trusted, because a check would synchronise.

        Args:
            subtree_end: integer [N]; `subtree_end[j]` is the first DFS index past the subtree of token j.
            past_length: P, number of ancestor tokens whose keys and values precede the forest.
            partial_share: see the attribute; helps `impl="auto"` of attention to choose the faster kernel.
            on_host: see the attribute; for data on an accelerator it avoids a synchronisation, because leaf rows,
                recurrences and convolutions are planned on the host.

        Raises:
            TypeError: `subtree_end` is not integer.
            ValueError: `subtree_end` is not a forest in DFS order, `past_length` is negative, or `partial_share` is
                not in [0, 1].
        """
        if subtree_end.is_floating_point() or subtree_end.dtype == torch.bool:
            raise TypeError(f"subtree_end: expected an integer tensor [N], received {subtree_end.dtype}")
        if subtree_end.dim() != 1:
            raise ValueError(f"subtree_end: expected shape [N], received {tuple(subtree_end.shape)}")
        if past_length < 0:
            raise ValueError(f"past_length: expected >= 0, received {past_length}")
        if partial_share is not None and not 0 <= partial_share <= 1:
            raise ValueError(f"partial_share: expected a value in [0, 1] or None, received {partial_share}")
        end = subtree_end.detach().to(torch.int32).contiguous()
        if end.device.type == "cpu":
            _check_forest(end.numpy())
            on_host = end.numpy()
        host = None if on_host is None else on_host.astype(np.int32, copy=False)
        return cls(end, _positions(end), int(past_length), partial_share, host)

    @property
    def num_tokens(self) -> int:
        """N, number of unique tokens."""
        return self.subtree_end.shape[0]

    @property
    def device(self) -> torch.device:
        """Device of the vectors."""
        return self.subtree_end.device

    def subtree_end_on_host(self) -> np.ndarray:
        """`subtree_end` in host memory, int32 [N]; waits for the device if only the device has it."""
        if self.on_host is None:
            self.on_host = self.subtree_end.cpu().numpy()
        return self.on_host

    @property
    def depth(self) -> torch.Tensor:
        """int32 [N], depth of each token on its whole path, past included."""
        return self.position + self.past_length

    def to(self, device: torch.device | str) -> "TreeLayout":
        """The same layout on `device` (itself if it is already there), copied asynchronously."""
        target = torch.device(device)
        if target == self.device or (target.type == self.device.type and target.index is None):
            return self
        subtree_end, position = (moved(t, target) for t in (self.subtree_end, self.position))
        return TreeLayout(subtree_end, position, self.past_length, self.partial_share, self.on_host)

    def metadata(self, key: Hashable, build: Callable[["TreeLayout"], Any]) -> Any:
        """`build(self)`, cached under `key`."""
        if key not in self._metadata:
            self._metadata[key] = build(self)
        return self._metadata[key]

    def __repr__(self) -> str:
        return f"TreeLayout(num_tokens={self.num_tokens}, past_length={self.past_length}, device={self.device})"


def kept(
    build: Callable[Concatenate[TreeLayout, Options], Made],
) -> Callable[Concatenate[TreeLayout, Options], Made]:
    """Decorator that caches results with the layout, by function and hashable options."""

    @functools.wraps(build)
    def once(layout: TreeLayout, /, *args: Options.args, **kwargs: Options.kwargs) -> Made:
        key = (build.__module__, build.__qualname__, args, tuple(sorted(kwargs.items())))
        made: Made = layout.metadata(key, lambda same: build(same, *args, **kwargs))
        return made

    return once


def _positions(end: torch.Tensor) -> torch.Tensor:
    """Depth of each token: the number of earlier tokens minus those whose subtree has already ended."""
    num_tokens = end.shape[0]
    closed_at = torch.zeros(num_tokens + 1, dtype=torch.int32, device=end.device)
    closed_at.index_add_(0, end.clamp(0, num_tokens).long(), torch.ones_like(end))
    index = torch.arange(num_tokens, dtype=torch.int32, device=end.device)
    return index - closed_at.cumsum(0, dtype=torch.int32)[:num_tokens]


def depths_on_host(end: np.ndarray) -> np.ndarray:
    """`_positions` in NumPy, int64 [N]."""
    num_tokens = len(end)
    return np.arange(num_tokens) - np.cumsum(np.bincount(end, minlength=num_tokens + 1))[:num_tokens]


def _check_forest(end: np.ndarray) -> None:
    """Raise unless the intervals [j, end[j]) are nested, by closing them innermost first.

    When token j is closed, exactly `position[j]` tokens must be open; the first interval that crosses another one
    violates this.
    """
    num_tokens = end.shape[0]
    index = np.arange(num_tokens)
    outside = np.flatnonzero((end <= index) | (end > num_tokens))
    if outside.size:
        token = int(outside[0])
        raise ValueError(
            f"subtree_end[{token}]: expected a value in [{token + 1}, {num_tokens}], received {int(end[token])}"
        )
    position = depths_on_host(end)
    closing_order = num_tokens - 1 - np.argsort(end[::-1], kind="stable")
    left_open = end[closing_order] - (index + 1)
    crossing = np.flatnonzero(left_open != position[closing_order])
    if crossing.size:
        token = int(closing_order[crossing[0]])
        raise ValueError(
            f"subtree_end: expected nested subtrees in DFS order, received [{token}, {int(end[token])}) of token "
            f"{token} crossing the subtree of another token; order the tokens by depth-first traversal"
        )
