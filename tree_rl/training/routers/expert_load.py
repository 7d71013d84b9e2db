"""`router_aux_loss_coef`: load and auxiliary loss of experts over all rows of an update, on all ranks.

The loss is linear in the routers' probabilities once everybody's load is known. Micro-batches, partitions and ranks
therefore add up to transformers' loss of all rows in one batch. The load is remembered from an inference with the same
weights, else counted by one more pass without gradients. Legend: L layers with experts, E experts, B rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed

from tree_rl.models.routers.load_balance import balance_weight
from tree_rl.models.routers.trace import RouterHooks
from tree_rl.models.sequence_parallel import SequenceParallel
from tree_rl.training.context import StepContext
from tree_rl.training.routers.forest_routing import ForestRouting
from tree_rl.training.row_memory import RowMemory
from tree_rl.training.rows import Rows


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """Load of experts in one update, over all ranks."""

    max_over_mean: float
    """Load of the fullest expert of any layer over the mean."""
    min_over_mean: float
    """Load of the emptiest expert of any layer over the mean."""
    idle_experts: int
    """Experts of any layer that no token visited."""
    aux_loss: float | None
    """This rank's share of the auxiliary loss, before the factor, the same on ranks that share a forest's tokens; None
    where the factor is 0."""
    counted_anew: bool
    """True if the update took one more pass to count."""


class ExpertLoad:
    """What a step knows about the load of its experts: of the present call, and of rows seen before."""

    def __init__(self, hooks: RouterHooks, coef: float, context: StepContext) -> None:
        """Start without knowledge.

        Args:
            hooks: on the model.
            coef: factor on the auxiliary loss; 0 only counts.
            context: device and ranks.
        """
        self.memory = RowMemory()
        self._hooks, self._coef, self._context = hooks, coef, context
        self._ranks = SequenceParallel.of(context.sequence_parallel)
        self._counted_anew = False
        self.begin(None)

    @property
    def weight(self) -> torch.Tensor | None:
        """float64 [L, E], what a logical token's router probability costs in this call; None for no such cost."""
        return self._weight_LE

    def begin(self, weight_LE: torch.Tensor | None = None) -> None:
        """Forget what the last call ran."""
        shape = (len(self._hooks.layers), self._hooks.num_experts)
        self._weight_LE = weight_LE
        self._load_LE = torch.zeros(shape, dtype=torch.float64, device=self._context.device)
        self._share = torch.zeros((), dtype=torch.float64, device=self._context.device)
        self._load_of_row: dict[int, torch.Tensor] = {}

    def note(self, routing: ForestRouting, members: Sequence[int], *, is_inference: bool) -> None:
        """Count a forest that ran; `members` are its rows' indices in the call."""
        self._load_LE += routing.load(self._hooks.num_experts)
        self._share += routing.share
        if is_inference and self._coef:
            load_BLE = routing.load_of_rows(self._hooks.num_experts)
            self._load_of_row |= dict(zip(members, load_BLE, strict=True))

    def must_count(self, rows: Rows) -> bool:
        """Before an update: whether some rank does not know the load of its rows, so that all must run them once."""
        if not self._coef:
            return False
        is_unknown = self.memory.recall(rows, range(rows.num_rows)) is None
        self._counted_anew = bool(self._reduced(torch.tensor([float(is_unknown)]), "max").item())
        return self._counted_anew

    def charge(self, rows: Rows) -> None:
        """Before an update, after the pass that counted if there was one: what a router probability costs in it."""
        if not self._coef:
            return
        load_LE = self._load_LE
        if not self._counted_anew:
            known = self.memory.recall(rows, range(rows.num_rows)) or []
            load_LE = sum(known, start=torch.zeros_like(load_LE, device="cpu")).to(load_LE)
        load_LE = self._reduced(load_LE, "sum")
        num_tokens = self._reduced(load_LE.new_tensor([len(rows.token_ids_F)]), "sum")
        # All ranks, those that share tokens included, average their gradients: each takes as many times its share.
        scale = self._coef * self._context.num_ranks
        self.begin(scale * balance_weight(load_LE, max(float(num_tokens), 1.0)))

    def remember(self, rows: Rows) -> None:
        """After an inference: keep the load of each of its rows."""
        if self._coef:
            self.memory.remember(rows, [self._load_of_row[row] for row in range(rows.num_rows)])

    def report(self) -> LoadReport:
        """Of an update; all ranks call it."""
        load_LE = self._reduced(self._load_LE, "sum")
        share = self._share.clone()
        if self._ranks is not None:
            torch.distributed.all_reduce(share, group=self._ranks.group)
            share /= self._ranks.size
        ratio_LE = load_LE / load_LE.mean(dim=1, keepdim=True).clamp(min=1e-9)
        return LoadReport(
            max_over_mean=float(ratio_LE.max()),
            min_over_mean=float(ratio_LE.min()),
            idle_experts=int((load_LE == 0).sum()),
            aux_loss=float(share) / self._coef if self._coef else None,
            counted_anew=self._counted_anew,
        )

    def _reduced(self, values: torch.Tensor, kind: str) -> torch.Tensor:
        """The sum or the maximum over all ranks, on the device; rows that ranks hold alike count once."""
        values = values.to(self._context.device)
        if self._context.num_ranks > 1:
            ops = {"sum": torch.distributed.ReduceOp.SUM, "max": torch.distributed.ReduceOp.MAX}
            torch.distributed.all_reduce(values, op=ops[kind], group=self._context.data_parallel)
        copies = 1 if kind == "max" or self._ranks is None else self._ranks.size
        return values / copies
