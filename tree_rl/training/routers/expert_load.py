"""`router_aux_loss_coef`: load and auxiliary loss of experts over all rows of an update, on all ranks.

Once the total load is known, the loss is linear in the routers' probabilities. Its parts from micro-batches, partitions
and ranks therefore add up to transformers' loss of all rows in one batch. The load is remembered from an inference with
the same weights, or counted in an extra pass without gradients. Legend: L layers with experts, E experts, B rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed

from tree_rl.models.routers.load_balance import balance_weight
from tree_rl.models.routers.trace import RouterHooks
from tree_rl.training.context import StepContext
from tree_rl.training.last_inference import LastInference
from tree_rl.training.routers.forest_routing import ForestRouting
from tree_rl.training.rows import Rows


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """Load of experts in one update, over all ranks."""

    max_over_mean: float
    """Largest load of an expert over its layer's mean, in any layer."""
    min_over_mean: float
    """Smallest load of an expert over its layer's mean, in any layer."""
    idle_experts: int
    """Number of experts, over all layers, that no token visited."""
    aux_loss: float | None
    """This rank's share of the auxiliary loss, before the factor; equal on ranks that share a forest's tokens. None if
    the factor is 0."""
    has_extra_pass: bool
    """True if the update needed an extra pass to count the load."""


class ExpertLoad:
    """Load of a step's experts: in the current call, and in rows of the last inference."""

    def __init__(self, hooks: RouterHooks, coef: float, context: StepContext) -> None:
        """Start without loads; `coef` is the factor on the auxiliary loss, and 0 only counts.

        Raises:
            UnsupportedModelError: the model's routers have no auxiliary loss.
        """
        hooks.check_auxiliary_loss(coef)
        self.last_inference = LastInference()
        self._hooks, self._coef, self._context = hooks, coef, context
        self._ranks = context.ranks
        self._has_extra_pass = False
        self.begin()

    def begin(self, weight_LE: torch.Tensor | None = None) -> None:
        """Start a pass: reset the counts of the last one."""
        shape = (len(self._hooks.layers), self._hooks.num_experts)
        self.weight_LE = weight_LE
        """float64 [L, E], factor on a token's router probabilities in this call's auxiliary loss; None without one."""
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

    def agree_to_count(self, rows: Rows) -> bool:
        """Before an update, collective: True if any rank lacks the load of its rows, so that all need an extra pass."""
        if not self._coef:
            return False
        is_unknown = self.last_inference.recall(rows, range(rows.num_rows)) is None
        self._has_extra_pass = bool(self._reduced(torch.tensor([float(is_unknown)]), "max").item())
        return self._has_extra_pass

    def charge(self, rows: Rows) -> None:
        """Before an update, after the extra pass if there is one: compute `weight_LE` from the load on all ranks."""
        if not self._coef:
            return
        load_LE = self._load_LE
        if not self._has_extra_pass:
            known = self.last_inference.recall(rows, range(rows.num_rows)) or []
            load_LE = sum(known, start=torch.zeros_like(load_LE, device="cpu")).to(load_LE)
        load_LE = self._reduced(load_LE, "sum")
        num_tokens = self._reduced(load_LE.new_tensor([len(rows.token_ids_F)]), "sum")
        # Gradients are averaged over all ranks, including those that share tokens; this turns the average into a sum.
        scale = self._coef * self._context.num_ranks
        self.begin(scale * balance_weight(load_LE, max(float(num_tokens), 1.0)))

    def remember(self, rows: Rows) -> None:
        """After an inference: keep the load of each of its rows."""
        if self._coef:
            self.last_inference.remember(rows, [self._load_of_row[row] for row in range(rows.num_rows)])

    def report(self) -> LoadReport:
        """The load of an update; all ranks must call it."""
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
            has_extra_pass=self._has_extra_pass,
        )

    def _reduced(self, values: torch.Tensor, kind: str) -> torch.Tensor:
        """Sum or maximum over all ranks, on the device; rows that several sequence-parallel ranks hold count once."""
        values = values.to(self._context.device)
        if self._context.num_ranks > 1:
            ops = {"sum": torch.distributed.ReduceOp.SUM, "max": torch.distributed.ReduceOp.MAX}
            torch.distributed.all_reduce(values, op=ops[kind], group=self._context.data_parallel)
        copies = 1 if kind == "max" or self._ranks is None else self._ranks.size
        return values / copies
