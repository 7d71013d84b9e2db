"""Steps of tiny models with experts whose tokens are scattered over gloo ranks, and the same steps on one rank."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from moe_models import REPLAYABLE, SHAPES, build, random_routes

from tree_rl.models import use_edge_head, use_tree_attention
from tree_rl.models.routers.merge_routes import NATIVE
from tree_rl.models.routers.trace import RouterHooks
from tree_rl.training import EdgeOutputs, Rows, StepContext, TreeOptions, TreeStep

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))


@dataclass(frozen=True, kw_only=True)
class Case:
    """An inference and an update of one model over the rows of each data-parallel group."""

    family: str
    shapes: tuple[str, ...]
    """Of each data-parallel group's rows; an empty name is a group without rows."""
    max_tokens: int | None = None
    coef: float | None = 0.5
    replays: bool = False
    """Whether routes are prescribed, some of them left to the router."""
    knows_load: bool = False
    """Whether an inference has counted the load before the update."""

    @property
    def name(self) -> str:
        marks = ["replays"] * self.replays + ["knows_load"] * self.knows_load
        return "-".join([self.family, *self.shapes, str(self.max_tokens), str(self.coef), *marks])


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a case gave on one rank, or on one rank of several."""

    gradients: dict[str, torch.Tensor]
    """As they lie in the parameters."""
    log_probs: torch.Tensor | None
    routes: torch.Tensor | None
    """Experts of each token, ascending."""
    load: tuple[float, float, int, float | None, bool] | None


def run(case: Case, groups: Sequence[int], share: Any) -> Outcome:
    """The rows of some data-parallel groups in one step; the loss of all groups is the sum over their rows."""
    named = [(group, index) for group in groups for index in range(len(SHAPES.get(case.shapes[group], [])))]
    token_ids = [SHAPES[case.shapes[group]][index] for group, index in named]
    model = build(REPLAYABLE[case.family]).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    use_tree_attention(model)
    use_edge_head(model)
    context = replace(StepContext.of(model, sequence_parallel=share), routers=RouterHooks(model))
    options = TreeOptions(
        mode="tree", max_tokens=case.max_tokens, router_aux_loss_coef=case.coef, self_check=share is not None
    )
    rows = Rows.of(token_ids)
    if case.replays and token_ids:
        rows = replace(rows, routes_FLK=torch.cat([_routes(case, *name) for name in named]).numpy())

    def loss(outputs: EdgeOutputs, members: Sequence[int]) -> tuple[torch.Tensor, None]:
        value_f = outputs["log_probs"]
        seeds = [100 * named[row][0] + named[row][1] for row in members]
        draws = [torch.Generator().manual_seed(seed) for seed in seeds]
        lengths = [len(token_ids[row]) for row in members]
        weight_f = torch.cat([torch.randn(n, generator=draw) for n, draw in zip(lengths, draws, strict=True)])
        # Ranks average their gradients.
        return (value_f * weight_f + 0.3 * value_f.square()).sum() * (len(case.shapes) / len(groups)), None

    step = TreeStep(model, options, context=context)
    if case.knows_load:
        step.infer(rows)
    result = step.run(rows, loss, records_routes=True, is_separable=True)
    load = result.load
    return Outcome(
        gradients={n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()},
        log_probs=result.outputs.present().get("log_probs"),
        routes=None if result.routes_FLK is None else result.routes_FLK.sort(-1).values,
        load=None
        if load is None
        else (load.max_over_mean, load.min_over_mean, load.idle_experts, load.aux_loss, load.has_extra_pass),
    )


def _routes(case: Case, group: int, index: int) -> torch.Tensor:
    """Routes [T, L, K] of one row; every third token is left to the router in one layer."""
    routes_TLK = torch.from_numpy(random_routes(SHAPES[case.shapes[group]], seed=group)[index].copy())
    routes_TLK[::3, 1] = NATIVE
    return routes_TLK
