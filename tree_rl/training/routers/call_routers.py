"""Routers while a forest of a call runs: replay the rows' routes, charge the auxiliary loss, record routes."""

import torch

from tree_rl.models.routers.merge_routes import routes_of_unique_tokens
from tree_rl.training.context import StepCall, StepContext
from tree_rl.training.micro_batch import MicroBatch
from tree_rl.training.routers.expert_load import ExpertLoad
from tree_rl.training.routers.forest_routing import ForestRouting


def open_routing(
    context: StepContext, call: StepCall, batch: MicroBatch, load: ExpertLoad | None
) -> ForestRouting | None:
    """The routing of a forest that is about to run; None without hooks on routers."""
    if context.routers is None:
        return None
    assert batch.forest is not None
    routes_NLK, routes_FLK = None, call.rows.routes_FLK
    if routes_FLK is not None:
        routes_NLK = routes_of_unique_tokens(batch.forest, routes_FLK[batch.flat_f])
    weight_LE = None if load is None else load.weight_LE
    return ForestRouting(batch.forest, context.device, routes=routes_NLK, weight_LE=weight_LE, ranks=context.ranks)


def close_routing(
    context: StepContext, call: StepCall, batch: MicroBatch, load: ExpertLoad | None, routing: ForestRouting
) -> torch.Tensor | None:
    """After a forest ran: count its load; int16 [f, L, K] routes of its rows where the call records them."""
    if load is not None:
        load.note(routing, batch.rows, is_inference=not call.trains)
    if not call.records_routes:
        return None
    assert context.routers is not None
    return routing.routes_of_rows(context.routers.layers, context.routers.num_layers)
