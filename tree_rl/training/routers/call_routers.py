"""What the routers do in one call: routes that its rows prescribe, the cost of imbalance, routes to record."""

from dataclasses import dataclass

import torch

from tree_rl.models.routers.merge_routes import routes_of_unique_tokens
from tree_rl.models.routers.trace import RouterHooks
from tree_rl.models.sequence_parallel import SequenceParallel
from tree_rl.training.context import StepCall
from tree_rl.training.planning.micro_batches import MicroBatch
from tree_rl.training.routers.expert_load import ExpertLoad
from tree_rl.training.routers.forest_routing import ForestRouting


@dataclass(frozen=True, kw_only=True, slots=True)
class CallRouters:
    """Routers of a model with experts during one call; a dense model has none."""

    hooks: RouterHooks | None
    """On the model; None where nobody asks about its routers."""
    load: ExpertLoad | None
    """Counts experts' load and charges imbalance; None where not asked for."""
    ranks: SequenceParallel | None = None
    """Ranks that share a forest's tokens; None where one rank runs all of them."""

    def open(self, call: StepCall, batch: MicroBatch, device: torch.device) -> ForestRouting | None:
        """Before a forest runs; None where nobody asks."""
        if self.hooks is None or batch.forest is None:
            return None
        routes = [routes for row in batch.rows if (routes := call.rows.routes(row)) is not None]
        return ForestRouting(
            batch.forest,
            device,
            routes=routes_of_unique_tokens(batch.forest, routes) if routes else None,
            weight_LE=None if self.load is None else self.load.weight,
            ranks=self.ranks,
        )

    def close(self, routing: ForestRouting | None, call: StepCall, batch: MicroBatch) -> torch.Tensor | None:
        """After a forest ran: count its load; int16 [f, L, K] routes of its rows where the call records them."""
        if routing is None or self.hooks is None:
            return None
        if self.load is not None:
            self.load.note(routing, batch.rows, is_inference=not call.trains)
        if not call.records_routes:
            return None
        return routing.routes_of_rows(self.hooks.layers, self.hooks.num_layers)
