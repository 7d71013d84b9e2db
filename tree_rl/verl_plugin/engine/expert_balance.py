"""`tree.router_aux_loss_coef`: load and auxiliary loss of experts over all rows of an update, on all ranks.

The loss is linear in the routers' probabilities once everybody's load is known, so that micro-batches, partitions and
ranks add up to transformers' loss of all rows in one batch. The load is remembered from an inference with the same
weights, else counted by one more pass without gradients. Legend: L layers with experts, E experts, B rows.
"""

from typing import Any

import torch
import torch.distributed
from tensordict import TensorDict

from tree_rl.models.routers.load_balance import balance_weight
from tree_rl.models.routers.trace import RouterHooks
from tree_rl.training.routing import ForestRouting
from tree_rl.verl_plugin.compat import AggregationType, Metric, get_device_id
from tree_rl.verl_plugin.engine.lock_step import Agreement, agree_on_ops
from tree_rl.verl_plugin.engine.micro_batches import MicroBatch
from tree_rl.verl_plugin.engine.row_memory import RowMemory
from tree_rl.verl_plugin.engine.rows import Rows
from tree_rl.verl_plugin.engine.steps import make_step


class ExpertBalance:
    """What an engine knows about the load of its experts: of the present call, and of rows seen before."""

    def __init__(self, hooks: RouterHooks, coef: float, group: torch.distributed.ProcessGroup | None) -> None:
        """Start without knowledge.

        Args:
            hooks: on the engine's model.
            coef: factor on the auxiliary loss; 0 only counts.
            group: data-parallel group.
        """
        self.memory = RowMemory()
        self._hooks, self._coef, self._group = hooks, coef, group
        self._scale = coef * torch.distributed.get_world_size(group)
        self.counted_anew = False
        """Whether the last update took one more pass to count."""
        self._begin(None)

    @property
    def weight(self) -> torch.Tensor | None:
        """float64 [L, E], what a logical token's router probability costs in this call; None for no such cost."""
        return self._weight_LE

    def note(self, routing: ForestRouting, members: list[int], forward_only: bool) -> None:
        """Count a forest that ran; `members` are its rows' indices in the call."""
        self._load_LE += routing.load(self._hooks.num_experts)
        self._share += routing.share
        if forward_only and self._coef:
            load_BLE = routing.load_of_rows(self._hooks.num_experts)
            self._load_of_row |= dict(zip(members, load_BLE, strict=True))

    def prepare(
        self,
        engine: Any,
        data: TensorDict,
        rows: Rows,
        micro_batches: list[MicroBatch],
        agreement: Agreement,
        forward_only: bool,
    ) -> bool:
        """Before a call runs: forget the last one; for an update learn the load of all rows on all ranks.

        Returns:
            False if a rank ran out of memory and all shall run the call again.
        """
        self._begin(None)
        if forward_only or not self._coef:
            return True
        known = self.memory.recall(rows, range(rows.num_rows))
        self.counted_anew = self._is_any(known is None)
        if self.counted_anew:
            steps = [make_step(engine, batch, data, rows, None, forward_only=True) for batch in micro_batches]
            ops = "".join(step.ops for step in steps)
            preview = agree_on_ops(ops, is_refused=False, may_repeat=agreement.may_repeat, group=self._group)
            if not engine.follow(preview, steps, forward_only=True):
                return False
            load_LE = self._load_LE
        else:
            load_LE = sum(known or (), start=torch.zeros_like(self._load_LE, device="cpu")).to(self._load_LE)
        num_tokens = load_LE.new_tensor([len(rows.token_ids_F)])
        torch.distributed.all_reduce(load_LE, group=self._group)
        torch.distributed.all_reduce(num_tokens, group=self._group)
        # verl's ranks average their gradients: each takes as many times its share.
        self._begin(self._scale * balance_weight(load_LE, max(float(num_tokens), 1.0)))
        return True

    def remember(self, rows: Rows) -> None:
        """After an inference: keep the load of each of its rows."""
        if self._coef:
            self.memory.remember(rows, [self._load_of_row[row] for row in range(rows.num_rows)])

    def metrics(self) -> dict[str, Metric]:
        """Of an update, the same on every rank but for shares of sums; verl averages sums over ranks."""
        torch.distributed.all_reduce(self._load_LE, group=self._group)
        ratio_LE = self._load_LE / self._load_LE.mean(dim=1, keepdim=True).clamp(min=1e-9)
        metrics = {
            "moe/load_max_over_mean": Metric(AggregationType.MAX, float(ratio_LE.max())),
            "moe/load_min_over_mean": Metric(AggregationType.MIN, float(ratio_LE.min())),
            "moe/idle_experts": Metric(AggregationType.MAX, float((self._load_LE == 0).sum())),
        }
        if self._coef:
            metrics["moe/aux_loss"] = Metric(AggregationType.SUM, float(self._share) / self._coef)
            metrics["moe/counted_anew"] = Metric(AggregationType.MAX, float(self.counted_anew))
        return metrics

    def _begin(self, weight_LE: torch.Tensor | None) -> None:
        """Forget what the last call ran."""
        shape = (len(self._hooks.layers), self._hooks.num_experts)
        self._weight_LE = weight_LE
        self._load_LE = torch.zeros(shape, dtype=torch.float64, device=get_device_id())
        self._share = torch.zeros((), dtype=torch.float64, device=get_device_id())
        self._load_of_row: dict[int, torch.Tensor] = {}

    def _is_any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        agreed = torch.tensor([float(flag)], device=get_device_id())
        torch.distributed.all_reduce(agreed, op=torch.distributed.ReduceOp.MAX, group=self._group)
        return bool(agreed.item())
