"""Rows with the experts that their rollout chose: as verl hands them over, and stock routers told to repeat them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from engine_harness import ALONE, FLAGS, Row, nested, ppo_batch
from equivalence import assert_equal_runs, run, wanted_positions
from tensordict import TensorDict
from tiny_families import EXPERTS
from verl.workers.config.engine import EngineRouterReplayConfig
from verl_losses import actor_loss

LAYERS, PER_TOKEN = 2, 2
Routes = list[np.ndarray]


def replaying(mode: str, **more: Any) -> dict[str, Any]:
    return {"engine": {"router_replay": EngineRouterReplayConfig(mode=mode), **more}}


def recorded_routes(rows: Sequence[Row], *, seed: int = 0) -> Routes:
    """Routes [T, LAYERS, PER_TOKEN] as a rollout leaves them: mostly those of other rows, zeros without a record."""
    draw = np.random.default_rng(seed)
    table = np.stack([draw.permutation(EXPERTS)[:PER_TOKEN] for _ in range(3)]).astype(np.int16)
    shared = draw.integers(0, len(table), (max(len(row.tokens) for row in rows), LAYERS))
    routes = []
    for row in rows:
        choice = shared[: len(row.tokens)].copy()
        changed = draw.random(len(choice)) < 0.1
        choice[changed] = draw.integers(0, len(table), (int(changed.sum()), LAYERS))
        routes_TLK = table[choice]
        routes_TLK[-1] = 0
        routes_TLK[3::7] = 0
        routes.append(routes_TLK)
    return routes


def batch_with(routes: Routes, rows: Sequence[Row], **flags: Any) -> TensorDict:
    data = ppo_batch(list(rows), **FLAGS, **flags)
    data["routed_experts"] = nested([torch.from_numpy(routes_TLK) for routes_TLK in routes])
    return data


@contextmanager
def stock_routers_told(routes: Routes, experts: int = EXPERTS) -> Iterator[None]:
    """Rows one after the other through stock model code whose top-k answers with given experts, repeated ones aside."""
    stock = torch.topk
    answers = chain.from_iterable(np.moveaxis(routes_TLK, 1, 0) for routes_TLK in routes)

    def told(values: torch.Tensor, k: int, dim: int = -1, **how: bool) -> tuple[torch.Tensor, torch.Tensor]:
        native = stock(values, k, dim=dim, **how).indices
        if values.shape[-1] != experts:
            return values.gather(-1, native), native  # A choice of groups of experts.
        wanted = torch.from_numpy(np.ascontiguousarray(next(answers))).long()
        index = torch.where((wanted == wanted[:, :1]).all(-1, keepdim=True), native, wanted)
        return values.gather(-1, index), index

    with patch.object(torch, "topk", told):
        yield
    assert next(answers, None) is None


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
