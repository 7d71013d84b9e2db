"""Which edges a rank computes under sequence parallelism: those whose source token it holds.

Legend: S ranks, E edges of the forward, e edges of this rank, m most edges of any rank.
"""

from dataclasses import dataclass

import numpy as np
import torch

from tree_kernels.host_copy import to_device
from tree_rl.models.sequence_parallel import SequenceParallel


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EdgeShare:
    """This rank's edges of one forward, and where to find each edge among the values gathered from all ranks."""

    ranks: SequenceParallel
    """Ranks that share the forward's tokens."""
    own_e: np.ndarray
    """int64 [e], indices of this rank's edges."""
    first_token: int
    """Index of this rank's first token."""
    most: int
    """m, at least 1: number of values that every rank contributes to the gather."""
    place_E: torch.Tensor
    """int64 [E] on the device, index of each edge among the S * m gathered values."""

    @classmethod
    def of(
        cls, source_E: np.ndarray, num_tokens: int, ranks: SequenceParallel, device: torch.device | str
    ) -> "EdgeShare":
        """Assign each edge (int [E], its source token) to the rank that holds it; `num_tokens` is without padding."""
        own_tokens = ranks.own_tokens(num_tokens)
        owner_E = source_E // own_tokens
        count = np.bincount(owner_E, minlength=ranks.size)
        most = max(int(count.max()), 1)
        order = np.argsort(owner_E, kind="stable")
        place_E = np.empty(len(order), dtype=np.int64)
        place_E[order] = np.arange(len(order)) + np.repeat(np.arange(ranks.size) * most - count.cumsum() + count, count)
        return cls(
            ranks=ranks,
            own_e=np.flatnonzero(owner_E == ranks.rank),
            first_token=ranks.rank * own_tokens,
            most=most,
            place_E=to_device(place_E, device),
        )

    def asked(
        self, source_E: np.ndarray, target_E: np.ndarray, temperature_E: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """This rank's arguments of `request_edges`: source among its tokens, target, temperature, each [e]."""
        return source_E[self.own_e] - self.first_token, target_E[self.own_e], temperature_E[self.own_e]

    def gather(self, values_e: torch.Tensor) -> torch.Tensor:
        """Gather the values of all edges [E] from those of each rank; every rank must call it, even without edges."""
        padded = torch.nn.functional.pad(values_e, (0, self.most - len(values_e)))
        return self.ranks.gather_tokens(padded)[self.place_E]
