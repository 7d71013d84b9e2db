"""What a step over trees needs from its host: a plain torch loop, verl's FSDP2 engine, or another trainer."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed
from torch import nn

from tree_rl.cost.cost_model import ModelShape
from tree_rl.cost.memory.model import MemoryModel
from tree_rl.models.routers.trace import RouterHooks
from tree_rl.models.sequence_parallel import Exchanges, SequenceParallel
from tree_rl.models.support import leaks_when_packed
from tree_rl.training.loss.outputs import LOG_PROBS, EdgeOutputs, Wanted
from tree_rl.training.loss.rows_loss import Loss, Metrics, PartsLoss
from tree_rl.training.memory.memory_of_module import read_memory_model
from tree_rl.training.ranks.recovery import CountedCollectives
from tree_rl.training.rows import Rows

Group = torch.distributed.ProcessGroup | None
FlatRows = Callable[[Sequence[int], PartsLoss | None], tuple[torch.Tensor, EdgeOutputs, list[Metrics]]]
"""Runs rows without a tree: from their indices and the loss to the scalar loss, outputs [f] row after row, metrics."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepContext:
    """The model and how its host runs it; `of` gives that of a plain torch loop."""

    module: nn.Module
    """Prepared by `use_tree_attention`; sharded, wrapped or neither."""
    device: torch.device
    """Where it runs."""
    data_parallel: Group = None
    """The ranks that run in lock-step; None is the default group, where there is one."""
    sequence_parallel: Group = None
    """The ranks among them, this one included, that share each forest's tokens; they hold equal rows, and their
    gradients are averaged with all others. None: this rank runs its forests alone."""
    exchanges: Exchanges = field(default_factory=Exchanges)
    """Collectives among those, counted so that a rank can catch up after a failure."""
    model_shape: ModelShape | None = None
    """Sizes of the model, with which `mode: auto` compares costs; None runs every group as a tree."""
    memory: MemoryModel | None = None
    """What a forward and backward keep alive, by which groups beyond the budget run; None runs them in partitions of
    the budget's size."""
    compute_dtype: torch.dtype = torch.float32
    """Dtype of the forward, which decides how exact the self-check can be."""
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Mixed precision of forward and loss."""
    loss_scale: Callable[[], float] = lambda: 1.0
    """Factor on the loss, as float16 training asks for."""
    gradient_sync: Callable[[bool], AbstractContextManager[Any]] = lambda is_last: nullcontext()
    """Synchronisation of gradients in one op; called with True for the last backward of a call."""
    collectives: CountedCollectives | None = None
    """FSDP2's collectives, counted so that a rank can catch up after a failure; None without sharding."""
    may_repeat: bool = True
    """True if a call that ran out of memory can run again: all of its collectives are counted."""
    pending_bytes: Callable[[], int] = lambda: 0
    """Device memory that the first optimizer step will take for good."""
    routers: RouterHooks | None = None
    """Hooks on the routers of a model with experts; None leaves them alone."""
    is_deterministic: bool = False
    """True if equal runs shall give equal bits: then no measured time decides how rows run."""
    always_forest: bool = False
    """True if rows that share nothing run as a forest, too: packed by the host they see each other, or their attention
    takes the square of all their tokens."""

    @classmethod
    def of(cls, module: nn.Module, group: Group = None, *, sequence_parallel: Group = None) -> "StepContext":
        """The context of a plain torch loop.

        Args:
            module: prepared by `use_tree_attention`.
            group: ranks that run in lock-step.
            sequence_parallel: see the field.
        """
        first = next(module.parameters())
        return cls(
            module=module,
            device=first.device,
            data_parallel=group,
            sequence_parallel=sequence_parallel,
            memory=read_memory_model(module, dtype=first.dtype, device=first.device) if first.is_cuda else None,
            compute_dtype=first.dtype,
            always_forest=hasattr(module, "config") and leaks_when_packed(module),
        )

    @property
    def num_ranks(self) -> int:
        """Ranks of the data-parallel group; 1 where torch.distributed is not initialised."""
        is_alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
        return 1 if is_alone else torch.distributed.get_world_size(self.data_parallel)

    @property
    def ranks(self) -> SequenceParallel | None:
        """The ranks that share a forest's tokens; None where this rank runs its forests alone."""
        return SequenceParallel.of(self.sequence_parallel, self.exchanges)

    @property
    def sharing_ranks(self) -> int:
        """Ranks that share a forest's tokens, this one included."""
        return 1 if self.ranks is None else self.ranks.size

    def forward(self, **model_kwargs: Any) -> Any:
        """The module under the host's mixed precision."""
        with self.autocast():
            return self.module(**model_kwargs)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCall:
    """One call of a step: what runs and what is asked of it."""

    rows: Rows
    """All rows of this rank."""
    loss: Loss | None
    """The rows' loss; None where only outputs are wanted."""
    trains: bool
    """True if gradients are wanted."""
    outputs: Wanted = (LOG_PROBS,)
    """What the loss, or the caller, reads."""
    is_separable: bool = False
    """True if dL/dlog-prob of a token depends on no other token's log-prob, which spares partitions a pass."""
    flat_rows: FlatRows | None = None
    """Runs rows without a tree; None runs all of them as trees."""
    host_tokens: int | None = None
    """The host's own budget for one forward, in tokens; None is no limit."""
    records_routes: bool = False
    """True if the result tells which experts ran."""
    is_reference: bool = False
    """True if the module runs without its adapters, as a reference policy: nothing it says is remembered."""
