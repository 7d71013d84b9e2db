"""The token budget of one forward, and the memory model that chooses how a group beyond it runs.

The budget counts unique tokens of a forest that runs whole. `tree.max_tokens: auto` learns it from the first update on
this GPU. After a CUDA out-of-memory error on any rank, all ranks take a budget of half the bytes that the failed step
was predicted to need, and repeat the step once.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.distributed.tensor import DTensor

from tree_rl.cost.memory.budget import room_beside, rounded_tokens, working_scale
from tree_rl.cost.memory.choice import Chooser, MemoryChoice
from tree_rl.cost.memory.model import GIB, MemoryModel, Peak
from tree_rl.training.context import StepContext
from tree_rl.training.memory.host import host_bytes_of_rank, local_ranks
from tree_rl.training.micro_batch import MicroBatch, largest_forward, live_tokens, predicted_peak

logger = logging.getLogger(__name__)

NO_LIMIT = 2**31 - 1


class MemoryBudget:
    """What one step knows of its memory. Budget and working set are the same on all ranks."""

    def __init__(self, context: StepContext, offload: bool | str) -> None:
        """Start without a learnt budget; `offload` is `tree.offload`."""
        memory = context.memory
        self._context, self._offload = context, offload
        self._uncorrected = None if memory is None else replace(memory, sequence_ranks=context.sharing_ranks)
        self._chooser: Chooser | None = None
        self._logged: set[tuple[bool, bool, bool, bool]] = set()
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

    @property
    def model(self) -> MemoryModel | None:
        """The memory model of the module, corrected by the first update; None: groups beyond the budget run in
        partitions within it."""
        return None if self._uncorrected is None else self._uncorrected.scaled(self.working_scale)

    def predicted(self, batches: Sequence[MicroBatch]) -> Peak | None:
        """Largest predicted peaks of the micro-batches; None without a memory model."""
        model = self.model
        return None if model is None else predicted_peak(batches, model)

    def chooser(self) -> Chooser | None:
        """Chooses how a group beyond the budget runs; a new object for each correction of the working set."""
        model, last = self.model, self._chooser
        if model is not None and (last is None or last.model.working_scale != self.working_scale):
            # Host memory is measured once: later, this rank's own buffers would count as taken.
            host_bytes = self._host_bytes() if last is None else last.host_bytes
            self._chooser = Chooser(model=model, offload=self._offload, host_bytes=host_bytes)
        return self._chooser

    def log_choice(self, choice: MemoryChoice, unique_tokens: int, max_tokens: int) -> None:
        """Log how a group beyond the budget runs, each kind of choice once."""
        if choice.kind in self._logged:
            return
        self._logged.add(choice.kind)
        logger.info(
            "a group of %d unique tokens, beyond tree.max_tokens=%d, runs as: %s; predicted peak beside weights, "
            "gradients and optimizer: %.1f GiB on the device, %.1f GiB on the host",
            unique_tokens,
            max_tokens,
            choice.name,
            choice.peak.device / GIB,
            choice.peak.host / GIB,
        )
        if choice.needs_host:
            logger.warning(
                "a cheaper way needs %.1f GiB of host memory, but this rank may take %.1f GiB; give the job more "
                "host memory or run fewer ranks per node",
                choice.needs_host / GIB,
                0.0 if self._chooser is None else self._chooser.host_bytes / GIB,
            )

    def bytes_before_update(self) -> int:
        """Device memory in use, plus what the update will allocate and keep; `learn` measures the peak from now on."""
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() + self._context.pending_bytes() + gradients_to_come(self._context.module)

    def learn(self, batches: Sequence[MicroBatch], base_bytes: int) -> None:
        """Set the budget from the peak memory of the update that ran these micro-batches.

        All ranks take the largest working set and the smallest budget.

        Args:
            batches: the update's micro-batches; none on a rank without rows.
            base_bytes: result of `bytes_before_update`.
        """
        used_bytes = torch.cuda.max_memory_allocated() + self._context.pending_bytes() - base_bytes
        room = room_beside(base_bytes, torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
        if self._uncorrected is None:
            live = live_tokens(batches)
            mine = rounded_tokens(room / (used_bytes / live)) if live and used_bytes > 0 else NO_LIMIT
            self.tokens = int(self._least(mine))
        else:
            scale = working_scale(self._uncorrected, lambda model: predicted_peak(batches, model).device, used_bytes)
            # Ranks compute their budgets with the largest working set, so they agree on it first.
            self.working_scale = -self._least(-scale)
            corrected = self._uncorrected.scaled(self.working_scale)
            self.tokens = int(self._least(rounded_tokens(corrected.tokens_of(room))))
        logger.info(
            "tree.max_tokens=auto: %d unique tokens per forward, %.1f GiB beside weights and optimizer; a layer works "
            "with %.2f times the bytes that the model's shape gives",
            self.tokens,
            room / GIB,
            self.working_scale,
        )

    def shrink_after(self, is_out_of_memory: bool, batches: Sequence[MicroBatch], tokens: int) -> int | None:
        """Agree on a smaller budget if any rank ran out of memory; None if none did.

        Args:
            is_out_of_memory: True if this rank ran out of memory.
            batches: this rank's micro-batches of the call.
            tokens: the budget with which the call was planned.
        """
        smaller, model = largest_forward(batches) // 2, self.model
        if model is not None:
            smaller = model.tokens_of(min(predicted_peak(batches, model).device, model.bytes_of(tokens)) / 2)
        agreed = int(self._least(rounded_tokens(smaller) if is_out_of_memory else NO_LIMIT))
        if agreed == NO_LIMIT:
            return None
        self.tokens = self.most_flat_tokens = agreed
        return agreed

    def _least(self, value: float) -> float:
        """The smallest value of all ranks; a single rank does not wait for its device."""
        if self._context.num_ranks == 1:
            return value
        device = "cuda" if torch.cuda.is_available() else "cpu"
        least = torch.tensor(value, dtype=torch.float64, device=device)
        torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN, group=self._context.data_parallel)
        return least.item()

    def _host_bytes(self) -> float:
        """Host memory that this rank may use; ranks that share tokens must choose alike and take the minimum."""
        on_this_rank = host_bytes_of_rank(local_ranks(self._context.num_ranks, torch.cuda.device_count()))
        group = self._context.sequence_parallel
        if group is None:
            return on_this_rank
        of_each: list[Any] = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(of_each, on_this_rank, group=group)
        return min(of_each)


def gradients_to_come(module: nn.Module) -> int:
    """Bytes of gradients on this rank's device that the next backward will allocate and keep."""
    return device_bytes_of([one for one in module.parameters() if one.requires_grad and one.grad is None])


def device_bytes_of(parameters: Sequence[nn.Parameter]) -> int:
    """Bytes of this rank's shards; none for those that FSDP2 keeps on the host, as it does their gradients."""
    local = [one.to_local() if isinstance(one, DTensor) else one for one in parameters]
    return sum(one.numel() * one.element_size() for one in local if one.device.type != "cpu")
