"""Rows with the experts that their rollout chose: as verl hands them over, and stock routers told to repeat them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from engine_harness import ALONE, FLAGS, Row, nested, ppo_batch
from equivalence import assert_equal_runs, run, wanted_positions
from stock_routers import random_routes, stock_routers_told
from tensordict import TensorDict
from tiny_families import EXPERTS
from verl.workers.config.engine import EngineRouterReplayConfig
from verl_losses import actor_loss

LAYERS = 2
Routes = list[np.ndarray]


def replaying(mode: str, **more: Any) -> dict[str, Any]:
    return {"engine": {"router_replay": EngineRouterReplayConfig(mode=mode), **more}}


def recorded_routes(rows: Sequence[Row], *, seed: int = 0) -> Routes:
    """Routes [T, LAYERS, 2] as a rollout leaves them: mostly those of other rows, zeros without a record."""
    routes = random_routes([row.tokens for row in rows], seed=seed, layers=LAYERS, experts=EXPERTS, changed=0.1)
    for routes_TLK in routes:
        routes_TLK[-1] = 0
        routes_TLK[3::7] = 0
    return routes


def batch_with(routes: Routes, rows: Sequence[Row], **flags: Any) -> TensorDict:
    data = ppo_batch(list(rows), **FLAGS, **flags)
    data["routed_experts"] = nested([torch.from_numpy(routes_TLK) for routes_TLK in routes])
    return data


def stock_run(engine: Any, rows: Sequence[Row], routes: Routes, experts: int = EXPERTS) -> dict[str, Any]:
    with stock_routers_told(routes, experts):
        return run(engine, ppo_batch(list(rows), **FLAGS, **ALONE), actor_loss("vanilla", "token-mean"))


def assert_same(stock: dict[str, Any], tree: dict[str, Any], rows: Sequence[Row]) -> None:
    assert_equal_runs(stock, tree, wanted_positions(ppo_batch(list(rows))), ("log_probs", "entropy"))


def move_weights(engine: Any) -> None:
    """Another model from here on, as after some steps of an optimizer; the same on any number of ranks."""
    with torch.no_grad():
        for parameter in engine.module.parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            local.add_(torch.sin(local * 1e3) * 0.05)
