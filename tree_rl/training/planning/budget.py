"""How many tokens one forward may hold.

`tree.max_tokens: auto` learns it from what a token costs on this GPU in the first update. After a CUDA out-of-memory
error on any rank the budget halves on all, and the step that failed is repeated once.
"""

import logging
from dataclasses import dataclass

import torch
import torch.distributed

logger = logging.getLogger(__name__)

MEMORY_FRACTION = 0.8
"""Share of the device that model, optimizer and one path of partitions may take; the rest is for fragments."""
LEAST_TOKENS = 1024
"""No budget goes below this: shorter forwards leave the GPU idle."""
GRANULARITY = 1024
_NO_LIMIT = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Most tokens of one micro-batch."""

    unique_tokens: int
    """Of forests."""
    flat_tokens: int
    """Of rows that run without a tree."""


class AutoBudget:
    """Unique tokens per forward, learnt from peak memory."""

    def __init__(self, *, num_ranks: int = 1, group: torch.distributed.ProcessGroup | None = None) -> None:
        """Start without knowledge: the host's own budget holds until the first update was seen."""
        self._num_ranks, self._group = num_ranks, group
        self.tokens: int | None = None
        self._most_flat_tokens = _NO_LIMIT

    def state(self) -> dict[str, int | None]:
        """What it knows, for a checkpoint."""
        return {"tokens": self.tokens, "most_flat_tokens": self._most_flat_tokens}

    def restore(self, state: dict[str, int | None]) -> None:
        """Know what `state` returned; collective only in that all ranks must do it."""
        self.tokens = state["tokens"]
        self._most_flat_tokens = state["most_flat_tokens"] or _NO_LIMIT

    def budget(self, configured: int | str | None, host_tokens: int | None) -> Budget:
        """The budget of a call. One learnt from memory, or halved after an error, replaces the others.

        Args:
            configured: `max_tokens`; a number counts unique tokens.
            host_tokens: the host's own budget; None for no limit.
        """
        host = _NO_LIMIT if host_tokens is None else host_tokens
        unique = configured if isinstance(configured, int) else host
        return Budget(
            unique_tokens=unique if self.tokens is None else self.tokens,
            flat_tokens=min(host, self._most_flat_tokens),
        )

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
        mine = _NO_LIMIT
        if live_tokens and peak_bytes > base_bytes:
            per_token = (peak_bytes - base_bytes) / live_tokens
            room = MEMORY_FRACTION * total_bytes - base_bytes
            mine = _rounded(room / per_token)
        self.tokens = self._smallest(mine)
        logger.info("tree.max_tokens=auto: %d unique tokens per forward", self.tokens)

    def shrink_after(self, is_out_of_memory: bool, largest_forward: int) -> int | None:
        """Agree on a smaller budget if any rank ran out of memory; None if none did.

        Args:
            is_out_of_memory: whether this rank did.
            largest_forward: most tokens of one forward of the call on this rank.
        """
        agreed = self._smallest(_rounded(largest_forward / 2) if is_out_of_memory else _NO_LIMIT)
        if agreed == _NO_LIMIT:
            return None
        self.tokens = self._most_flat_tokens = agreed
        return agreed

    def _smallest(self, tokens: int) -> int:
        """The smallest value over all ranks; a single rank need not wait for its device to know."""
        if self._num_ranks == 1:
            return tokens
        agreed = torch.tensor([tokens], device="cuda" if torch.cuda.is_available() else "cpu")
        torch.distributed.all_reduce(agreed, op=torch.distributed.ReduceOp.MIN, group=self._group)
        return int(agreed.item())


def _rounded(tokens: float) -> int:
    return max(LEAST_TOKENS, int(tokens) // GRANULARITY * GRANULARITY)
