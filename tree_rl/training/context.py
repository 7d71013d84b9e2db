"""What a step over trees needs from its trainer: a plain torch loop, verl's FSDP2 engine, or another one."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Any

import torch
import torch.distributed
from torch import nn

from tree_rl.cost.cost_model import ModelShape
from tree_rl.cost.memory.model import MemoryModel
from tree_rl.models.routers.trace import RouterHooks
from tree_rl.models.sequence_parallel import Exchanges, IssuedCollectives, SequenceParallel
from tree_rl.models.support import leaks_when_packed
from tree_rl.training.loss.outputs import LOG_PROBS, EdgeOutputs, Loss, Metrics, PartsLoss, Wanted
from tree_rl.training.memory.memory_of_module import read_memory_model
from tree_rl.training.ranks.recovery import CountedCollectives
from tree_rl.training.rows import Rows

Group = torch.distributed.ProcessGroup | None
FlatRows = Callable[[Sequence[int], PartsLoss | None], tuple[torch.Tensor, EdgeOutputs, list[Metrics]]]
"""Function that runs rows without a tree: takes their indices and the loss, returns the scalar loss, outputs [f] of
their f tokens, and metrics."""


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """The model and how its trainer runs it; `StepContext.of` builds one for a plain torch loop."""

    module: nn.Module
    """The model, prepared by `use_tree_attention`; it may be sharded or wrapped."""
    device: torch.device
    data_parallel: Group = None
    """All ranks, which run one sequence of forwards and backwards in lock-step, those of `sequence_parallel` included
    (verl's data-parallel group has one of them). None: the default group, if there is one."""
    sequence_parallel: Group = None
    """Ranks of `data_parallel`, this one included, that split the tokens of each forest among them. They hold the same
    rows, and gradients are averaged over all of `data_parallel`. None: this rank runs its forests alone."""
    exchanges: Exchanges = field(default_factory=Exchanges)
    """Collectives of `sequence_parallel`, counted so that a rank can catch up after a failure."""
    model_shape: ModelShape | None = None
    """Sizes of the model, from which `mode: auto` compares costs; None runs every group as a tree."""
    memory: MemoryModel | None = None
    """Memory model that chooses how a group beyond the token budget runs; None: in partitions within the budget."""
    compute_dtype: torch.dtype = torch.float32
    """Dtype of the forward, which decides how exact the self-check can be."""
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Mixed precision of forward and loss."""
    loss_scale: Callable[[], float] = lambda: 1.0
    """Factor on the loss, for a gradient scaler in float16 training."""
    gradient_sync: Callable[[bool], AbstractContextManager[Any]] = lambda is_last: nullcontext()
    """Context of one op that turns gradient synchronisation on or off; gets True for the last backward of a call."""
    collectives: CountedCollectives | None = None
    """FSDP2's collectives, counted so that a rank can catch up after a failure; None without sharding."""
    may_repeat: bool = True
    """True if a call that ran out of memory can run again, because all of its collectives are counted."""
    pending_bytes: Callable[[], int] = lambda: 0
    """Device memory that the first optimizer step will allocate and keep."""
    routers: RouterHooks | None = None
    """Hooks on the routers of a Mixture-of-Experts model; None: nothing is replayed, recorded or counted."""
    is_deterministic: bool = False
    """True if two equal runs must give equal bits; measured times then do not decide how rows run."""
    always_forest: bool = False
    """True if even rows without a common prefix must run as a forest, because the trainer's packed forward lets rows
    see each other, or needs memory quadratic in all packed tokens."""

    @classmethod
    def of(cls, module: nn.Module, group: Group = None, *, sequence_parallel: Group = None) -> "StepContext":
        """The context of a plain torch loop; `group` becomes `data_parallel`, see the fields."""
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

    @cached_property
    def num_ranks(self) -> int:
        """Size of `data_parallel`; 1 if torch.distributed is not initialised."""
        is_alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
        return 1 if is_alone else torch.distributed.get_world_size(self.data_parallel)

    @cached_property
    def ranks(self) -> SequenceParallel | None:
        """The ranks of `sequence_parallel` alone, not of `data_parallel`; None if this rank runs its forests alone."""
        group = self.sequence_parallel
        if group is None or torch.distributed.get_world_size(group) == 1:
            return None
        size, rank = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
        return SequenceParallel(group, size, rank, self.exchanges)

    @cached_property
    def idle_token(self) -> int:
        """The first token id that pads in no embedding: where its embedding is zero, gradients of Gemma 3n are not
        finite, so that even 0 times its logits spoils them."""
        padding = {part.padding_idx for part in self.module.modules() if isinstance(part, nn.Embedding)}
        return next(token for token in count() if token not in padding)

    @property
    def sharing_ranks(self) -> int:
        """Number of ranks that share a forest's tokens, this one included."""
        return 1 if self.ranks is None else self.ranks.size

    @property
    def counters(self) -> list[IssuedCollectives]:
        """Counters of the collectives that this rank issues in a call."""
        return [self.exchanges, *([] if self.collectives is None else [self.collectives])]

    def forward(self, **model_kwargs: Any) -> Any:
        """Run the module under the trainer's mixed precision."""
        with self.autocast():
            return self.module(**model_kwargs)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCall:
    """One call of a step: the rows, and what to compute of them."""

    rows: Rows
    """All rows of this rank."""
    loss: Loss | None
    """Loss of the rows; None if only outputs are wanted."""
    trains: bool
    """True if gradients are wanted."""
    outputs: Wanted = (LOG_PROBS,)
    """Names of the outputs that the loss or the caller reads."""
    is_separable: bool = False
    """True if dL/dlog-prob of a token depends on no other token's log-prob; partitions then need no extra pass."""
    couples_log_probs_alone: bool = False
    """True if a loss that couples tokens couples their log-probs alone; remembered ones then replace the extra pass."""
    run_rows_flat: FlatRows | None = None
    """Function that runs rows without a tree; None runs all of them as trees."""
    trainer_tokens: int | None = None
    """The trainer's token budget for one forward; None is no limit."""
    records_routes: bool = False
    """True if the result must contain which experts ran."""
    is_reference: bool = False
    """True if the module runs without its adapters, as a reference policy; its outputs are not remembered."""
