"""Routers during one call: replay the rows' routes, charge the auxiliary loss, record routes."""

from dataclasses import dataclass

import torch

from tree_rl.models.routers.merge_routes import routes_of_unique_tokens
from tree_rl.models.routers.trace import RouterHooks
from tree_rl.models.sequence_parallel import SequenceParallel
from tree_rl.training.context import StepCall
from tree_rl.training.micro_batch import MicroBatch
from tree_rl.training.routers.expert_load import ExpertLoad
from tree_rl.training.routers.forest_routing import ForestRouting


@dataclass(frozen=True, kw_only=True, slots=True)
class CallRouters:
    """The model's routers during one call."""

    hooks: RouterHooks
    """Hooks on the model's routers."""
    load: ExpertLoad | None
    """Counts the load of experts and weights the auxiliary loss; None without `router_aux_loss_coef`."""
    ranks: SequenceParallel | None
    """Ranks that share a forest's tokens; None if this rank runs all of them."""

    def open(self, call: StepCall, batch: MicroBatch, device: torch.device) -> ForestRouting:
        """The routing of a forest that is about to run."""
        assert batch.forest is not None
        routes_NLK, routes_FLK = None, call.rows.routes_FLK
        if routes_FLK is not None:
            routes_NLK = routes_of_unique_tokens(batch.forest, routes_FLK[batch.flat_f])
        return ForestRouting(
            batch.forest,
            device,
            routes=routes_NLK,
            weight_LE=None if self.load is None else self.load.weight_LE,
            ranks=self.ranks,
        )

    def close(self, routing: ForestRouting, call: StepCall, batch: MicroBatch) -> torch.Tensor | None:
        """After a forest ran: count its load; int16 [f, L, K] routes of its rows where the call records them."""
        if self.load is not None:
            self.load.note(routing, batch.rows, is_inference=not call.trains)
        if not call.records_routes:
            return None
        return routing.routes_of_rows(self.hooks.layers, self.hooks.num_layers)
