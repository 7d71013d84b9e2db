"""How much one forward may hold, counted in unique tokens of a plain forest.

`tree.max_tokens: auto` learns it from the first update on this GPU. After a CUDA out-of-memory error on any rank all
take the budget of half the bytes that the failed step was predicted to need, and repeat it once.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed

from tree_rl.cost.memory.budget import room_beside, rounded_tokens, working_scale
from tree_rl.cost.memory.model import GIB, MemoryModel

logger = logging.getLogger(__name__)

NO_LIMIT = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Most tokens of one micro-batch."""

    unique_tokens: int
    """Most tokens of forests."""
    flat_tokens: int
    """Most tokens of rows that run without a tree."""


class AutoBudget:
    """Unique tokens per forward, learnt from peak memory."""

    def __init__(self, *, num_ranks: int = 1, group: torch.distributed.ProcessGroup | None = None) -> None:
        """Start without knowledge: the host's own budget holds until the first update was seen."""
        self._num_ranks, self._group = num_ranks, group
        self.tokens: int | None = None
        """Replaces every other budget; None until it is learnt."""
        self.working_scale = 1.0
        """What the first update found a layer's working set to be, over what the memory model counts."""
        self.most_flat_tokens = NO_LIMIT
        """Limit on rows that run without a tree, after memory has run out."""

    def state(self) -> dict[str, Any]:
        """What it knows, for a checkpoint."""
        return {
            "tokens": self.tokens,
            "most_flat_tokens": self.most_flat_tokens,
            "working_scale": self.working_scale,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Know what `state` returned; collective only in that all ranks must do it."""
        self.tokens = state["tokens"]
        self.most_flat_tokens = state["most_flat_tokens"] or NO_LIMIT
        # Checkpoints of versions without a memory model lack it.
        self.working_scale = state.get("working_scale", 1.0)

    def learn(self, *, live_tokens: int, base_bytes: int, peak_bytes: int, total_bytes: int) -> None:
        """Size the budget from one update; all ranks take the smallest. Only the first call counts.

        Args:
            live_tokens: most unique tokens whose graphs were alive at a time; 0 on a rank without rows.
            base_bytes: weights, gradients and optimizer state.
            peak_bytes: most allocated during it.
            total_bytes: memory of the device.
        """
        if self.tokens is not None:
            return
        mine = NO_LIMIT
        if live_tokens and peak_bytes > base_bytes:
            per_token = (peak_bytes - base_bytes) / live_tokens
            mine = rounded_tokens(room_beside(base_bytes, total_bytes) / per_token)
        self.tokens, _ = self._agree(mine, 1.0)
        logger.info("tree.max_tokens=auto: %d unique tokens per forward", self.tokens)

    def learn_with(
        self, model: MemoryModel, predicted: Callable[[MemoryModel], float], *, base_bytes: int, peak_bytes: int,
        total_bytes: int,
    ) -> None:  # fmt: skip
        """Correct a memory model by one update and size the budget; all ranks take the largest working set and the
        smallest budget. Only the first call counts.

        Args:
            model: as it is before.
            predicted: peak of the update under a model; 0 on a rank without rows.
            base_bytes: and the others: as in `learn`.
        """
        if self.tokens is not None:
            return
        scale = working_scale(model, predicted, peak_bytes - base_bytes)
        room = room_beside(base_bytes, total_bytes)
        # Every rank sizes its own room by the largest working set, so that is agreed first.
        _, self.working_scale = self._agree(NO_LIMIT, scale)
        self.tokens, _ = self._agree(rounded_tokens(model.scaled(self.working_scale).tokens_of(room)), 1.0)
        logger.info(
            "tree.max_tokens=auto: %d unique tokens per forward, %.1f GiB beside weights and optimizer; a layer works "
            "with %.2f times the bytes that the model's shape gives",
            self.tokens,
            room / GIB,
            self.working_scale,
        )

    def shrink_after(self, is_out_of_memory: bool, smaller_tokens: int) -> int | None:
        """Agree on a smaller budget if any rank ran out of memory; None if none did.

        Args:
            is_out_of_memory: whether this rank did.
            smaller_tokens: the budget that this rank then wants.
        """
        agreed, _ = self._agree(rounded_tokens(smaller_tokens) if is_out_of_memory else NO_LIMIT, 1.0)
        if agreed == NO_LIMIT:
            return None
        self.tokens = self.most_flat_tokens = agreed
        return agreed

    def _agree(self, tokens: int, scale: float) -> tuple[int, float]:
        """The smallest tokens and the largest scale of all ranks; a single rank need not wait for its device."""
        if self._num_ranks == 1:
            return tokens, scale
        device = "cuda" if torch.cuda.is_available() else "cpu"
        agreed = torch.tensor([tokens, -scale], dtype=torch.float64, device=device)
        torch.distributed.all_reduce(agreed, op=torch.distributed.ReduceOp.MIN, group=self._group)
        least, negative = agreed.tolist()
        return int(least), -negative
