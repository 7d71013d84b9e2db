"""`tree.max_tokens: auto`: the budget follows from what a token costs on this GPU, measured on the first update.

After a CUDA out-of-memory error the budget halves; the step that failed is repeated once.
"""

import logging

import torch
import torch.distributed

logger = logging.getLogger(__name__)

MEMORY_FRACTION = 0.8
"""Share of the device that model, optimizer and one path of partitions may take; the rest is for fragments."""
LEAST_TOKENS = 1024
"""No budget goes below this: shorter forwards leave the GPU idle."""
GRANULARITY = 1024


class AutoBudget:
    """Unique tokens per forward, learnt from peak memory."""

    def __init__(self, group: torch.distributed.ProcessGroup | None = None) -> None:
        """Start without knowledge: verl's own budget holds until the first update was seen."""
        self.group = group
        self.tokens: int | None = None

    def budget(self, verl_tokens: int) -> int:
        """Unique tokens per forward, given verl's own budget for the call."""
        return verl_tokens if self.tokens is None else self.tokens

    def learn(self, *, live_tokens: int, base_bytes: int, peak_bytes: int, total_bytes: int) -> None:
        """Size the budget from one update; all ranks take the smallest. Only the first call counts.

        Args:
            live_tokens: most unique tokens whose graphs were alive at a time; 0 on a rank without rows.
            base_bytes: allocated before the update: parameters, optimizer state.
            peak_bytes: most allocated during it.
            total_bytes: memory of the device.
        """
        if self.tokens is not None:
            return
        mine = 2**31 - 1
        if live_tokens and peak_bytes > base_bytes:
            per_token = (peak_bytes - base_bytes) / live_tokens
            room = MEMORY_FRACTION * total_bytes - base_bytes
            mine = _rounded(room / per_token)
        agreed = torch.tensor([mine], device="cuda" if torch.cuda.is_available() else "cpu")
        torch.distributed.all_reduce(agreed, op=torch.distributed.ReduceOp.MIN, group=self.group)
        self.tokens = int(agreed.item())
        logger.info("tree.max_tokens=auto: %d unique tokens per forward", self.tokens)

    def shrink(self, used_tokens: int) -> int:
        """Halve the budget after an out-of-memory error; returns the new one.

        Args:
            used_tokens: the largest forward of the step that failed.
        """
        self.tokens = _rounded(used_tokens / 2)
        return self.tokens


def _rounded(tokens: float) -> int:
    return max(LEAST_TOKENS, int(tokens) // GRANULARITY * GRANULARITY)
