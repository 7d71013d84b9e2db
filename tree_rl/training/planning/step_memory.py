"""How a step uses its memory model: it chooses how large groups run, shrinks the budget, and logs its choices."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.distributed.tensor import DTensor

from tree_rl.cost.memory.choice import Chooser
from tree_rl.cost.memory.model import GIB, MemoryModel, Peak
from tree_rl.training.memory.host import host_bytes_of_rank, local_ranks
from tree_rl.training.micro_batch import MicroBatch, predicted_peak

logger = logging.getLogger(__name__)


class StepMemory:
    """The memory model of one step's module, and its chooser."""

    def __init__(
        self,
        model: MemoryModel,
        *,
        offload: bool | str,
        num_ranks: int,
        sequence_parallel: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        """Bind a model; available host memory is measured for the first `chooser`.

        Args:
            model: memory model of the module, uncorrected.
            offload: `tree.offload`.
            num_ranks: number of data-parallel ranks.
            sequence_parallel: ranks that must make the same choices; None: this rank chooses alone.
        """
        self.model = model
        self._offload, self._num_ranks, self._sequence_parallel = offload, num_ranks, sequence_parallel
        self._chooser: Chooser | None = None
        self._logged: set[tuple[bool, bool, bool, bool]] = set()

    def chooser(self, working_scale: float) -> Chooser:
        """Chooses how a group beyond the budget runs; a new object for each correction of the working set."""
        if self._chooser is None or self._chooser.model.working_scale != working_scale:
            # Host memory is measured once: later, this rank's own buffers would count as taken.
            host = self._host_bytes() if self._chooser is None else self._chooser.host_bytes
            model = self.model.scaled(working_scale)
            self._chooser = Chooser(model=model, offload=self._offload, host_bytes=host)
        return self._chooser

    def predicted(self, batches: Sequence[MicroBatch], working_scale: float) -> Peak:
        """Largest predicted peaks of the micro-batches."""
        return predicted_peak(batches, self.model.scaled(working_scale))

    def smaller_budget(self, batches: Sequence[MicroBatch], working_scale: float, tokens: int) -> int:
        """Tokens of a whole forest that needs half the predicted bytes of the failed call, or of its budget if less.

        The call was planned with the correction `working_scale` and the budget `tokens`.
        """
        model = self.model.scaled(working_scale)
        needed = min(predicted_peak(batches, model).device, model.bytes_of(tokens))
        return model.tokens_of(needed / 2)

    def tell(self, batches: Sequence[MicroBatch], tokens: int) -> None:
        """Log each new kind of choice once."""
        host_bytes = 0.0 if self._chooser is None else self._chooser.host_bytes
        for choice, batch in ((batch.choice, batch) for batch in batches):
            if choice is None or choice.kind in self._logged:
                continue
            self._logged.add(choice.kind)
            logger.info(
                "a group of %d unique tokens, beyond tree.max_tokens=%d, runs as: %s; predicted peak beside weights, "
                "gradients and optimizer: %.1f GiB on the device, %.1f GiB on the host",
                batch.unique_tokens,
                tokens,
                choice.name,
                choice.peak.device / GIB,
                choice.peak.host / GIB,
            )
            if choice.needs_host:
                logger.warning(
                    "a cheaper way needs %.1f GiB of host memory, but this rank may take %.1f GiB; give the job more "
                    "host memory or run fewer ranks per node",
                    choice.needs_host / GIB,
                    host_bytes / GIB,
                )

    def _host_bytes(self) -> float:
        """Host memory that this rank may use; under sequence parallelism the minimum over the ranks."""
        on_this_rank = host_bytes_of_rank(local_ranks(self._num_ranks, torch.cuda.device_count()))
        if self._sequence_parallel is None:
            return on_this_rank
        of_each: list[Any] = [None] * torch.distributed.get_world_size(self._sequence_parallel)
        torch.distributed.all_gather_object(of_each, on_this_rank, group=self._sequence_parallel)
        return min(of_each)


def gradients_to_come(module: nn.Module) -> int:
    """Bytes of gradients on this rank that the next backward will allocate and keep."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad and parameter.grad is None]
    local = [parameter.to_local() if isinstance(parameter, DTensor) else parameter for parameter in trained]
    return sum(parameter.numel() * parameter.element_size() for parameter in local)
