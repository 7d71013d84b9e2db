"""The token budget of one forward, in unique tokens of a forest that runs whole.

`tree.max_tokens: auto` learns it from the first update on this GPU. After a CUDA out-of-memory error on any rank, all
ranks take a budget of half the bytes that the failed step was predicted to need, and repeat the step once.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed

from tree_rl.cost.memory.budget import rounded_tokens, working_scale
from tree_rl.cost.memory.model import GIB, MemoryModel

logger = logging.getLogger(__name__)

NO_LIMIT = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Most tokens of one micro-batch."""

    unique_tokens: int
    """Limit for forests."""
    flat_tokens: int
    """Limit for rows that run without a tree."""


class AutoBudget:
    """Unique tokens per forward, learnt from the peak memory of the first update."""

    def __init__(self, *, num_ranks: int = 1, group: torch.distributed.ProcessGroup | None = None) -> None:
        self._num_ranks, self._group = num_ranks, group
        self.tokens: int | None = None
        """The learnt budget, which overrides all others; None until it is learnt."""
        self.working_scale = 1.0
        """Ratio of a layer's working set in the first update to the memory model's."""
        self.most_flat_tokens = NO_LIMIT
        """Limit on rows that run without a tree, lowered after memory has run out."""

    def state(self) -> dict[str, Any]:
        """The learnt values, for a checkpoint."""
        return {
            "tokens": self.tokens,
            "most_flat_tokens": self.most_flat_tokens,
            "working_scale": self.working_scale,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Load what `state` returned. It does not communicate, but every rank must call it."""
        self.tokens = state["tokens"]
        self.most_flat_tokens = state["most_flat_tokens"] or NO_LIMIT
        # Checkpoints of versions without a memory model lack it.
        self.working_scale = state.get("working_scale", 1.0)

    def learn(self, live_tokens: int, *, used_bytes: int, room: float) -> None:
        """Set the budget from one update; all ranks take the smallest. Only the first call has an effect.

        Args:
            live_tokens: most unique tokens whose graphs were alive at the same time; 0 on a rank without rows.
            used_bytes: peak allocation of the update, without weights, gradients and optimizer state.
            room: bytes that forwards may use.
        """
        if self.tokens is not None:
            return
        mine = rounded_tokens(room / (used_bytes / live_tokens)) if live_tokens and used_bytes > 0 else NO_LIMIT
        self.tokens = int(self._least(mine))
        logger.info("tree.max_tokens=auto: %d unique tokens per forward", self.tokens)

    def learn_with(
        self, model: MemoryModel, predicted: Callable[[MemoryModel], float], *, used_bytes: int, room: float
    ) -> None:
        """Correct a memory model by one update and set the budget; all ranks take the largest working set and the
        smallest budget. Only the first call has an effect.

        Args:
            model: the uncorrected model.
            predicted: peak of the update that a model predicts; 0 on a rank without rows.
            used_bytes: this and `room` are those of `learn`.
        """
        if self.tokens is not None:
            return
        # Ranks compute their budgets with the largest working set, so they agree on it first.
        self.working_scale = -self._least(-working_scale(model, predicted, used_bytes))
        self.tokens = int(self._least(rounded_tokens(model.scaled(self.working_scale).tokens_of(room))))
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
            is_out_of_memory: True if this rank ran out of memory.
            smaller_tokens: the budget that this rank proposes in that case.
        """
        agreed = int(self._least(rounded_tokens(smaller_tokens) if is_out_of_memory else NO_LIMIT))
        if agreed == NO_LIMIT:
            return None
        self.tokens = self.most_flat_tokens = agreed
        return agreed

    def _least(self, value: float) -> float:
        """The smallest value of all ranks; a single rank does not wait for its device."""
        if self._num_ranks == 1:
            return value
        device = "cuda" if torch.cuda.is_available() else "cpu"
        least = torch.tensor(value, dtype=torch.float64, device=device)
        torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN, group=self._group)
        return least.item()
