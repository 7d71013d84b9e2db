"""Gradients of all arms against stock verl's rows in float32, on every rank's own shards.

Legend: V vocabulary, L layers, E experts, K experts per token.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed
from many_gpus.ranks import DEVICE

from tree_rl.benchmark.gradient_gate import FLOAT32_LIMIT, NOISE, GateError
from tree_rl.models.routers.trace import KEYWORD, RouterTrace
from whole_models.arms import PACKED, STOCK, Arm, run_step
from whole_models.random_engine import RandomWeightsEngine

Shards = list[torch.Tensor]
"""This rank's part of every parameter's gradient."""


def exact_gradients(
    build: Callable[[], RandomWeightsEngine], arms: Sequence[Arm], kind: str, *, all_rows: int
) -> Shards:
    """Gradients of stock verl in float32; the engine that computes them is gone when this returns."""
    (stock,) = (arm for arm in arms if arm.name == STOCK)
    engine = build()
    with _gradients(engine, stock, kind, all_rows=all_rows) as shards:
        found = [shard.to("cpu", copy=True) for shard in shards]
    del engine, shards
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found


def check_arms(
    engine: RandomWeightsEngine, arms: Sequence[Arm], truth: Shards, kind: str, *, all_rows: int
) -> dict[str, float]:
    """Relative error of the gradient of every arm, over all parameters of all ranks.

    Raises:
        GateError: trees are further off than the rows.
    """
    errors: dict[str, float] = {}
    for arm in arms:
        with _gradients(engine, arm, kind, all_rows=all_rows) as shards:
            errors[arm.name] = relative_error(shards, truth)
    limit = max(NOISE * max(errors.get(name, 0.0) for name in (STOCK, PACKED)), FLOAT32_LIMIT)
    for name, error in errors.items():
        if not error <= limit:
            raise GateError(
                f"gradient of {name}: expected a relative error of at most {limit:.3g}, received {error:.3g}"
            )
    return errors


def relative_error(got: Shards, truth: Shards) -> float:
    """Norm of the difference over the norm of the truth; every rank adds its shards."""
    sums = torch.zeros(2, dtype=torch.float64, device=got[0].device)
    for one, exact in zip(got, truth, strict=True):
        exact = exact.to(one.device)
        sums += torch.stack([(one - exact).square().sum(), exact.square().sum()]).double()
    torch.distributed.all_reduce(sums)
    return float((sums[0] / sums[1]).sqrt())


@contextmanager
def _gradients(engine: RandomWeightsEngine, arm: Arm, kind: str, *, all_rows: int) -> Iterator[Shards]:
    """This rank's shards of the gradients, where the engine holds them; cleared behind."""
    with _routed_by_token(engine.module):
        run_step(engine, arm, kind, all_rows=all_rows, moves=False)
    yield [_local(parameter.grad) for parameter in engine.module.parameters()]
    engine.optimizer_zero_grad()


def _local(gradient: Any) -> torch.Tensor:
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient


@contextmanager
def _routed_by_token(model: Any) -> Iterator[None]:
    """Experts chosen by token id where a model has experts: near a tie, two precisions choose other ones."""
    config = model.config
    if not getattr(config, "num_experts", 0):
        yield
        return
    draw = torch.Generator().manual_seed(0)
    order_VLE = torch.rand(config.vocab_size, config.num_hidden_layers, config.num_experts, generator=draw)
    table_VLK = order_VLE.topk(config.num_experts_per_tok).indices.to(DEVICE, torch.int16)

    def route(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {**kwargs, KEYWORD: RouterTrace(table_VLK[kwargs["input_ids"][0].to(DEVICE)])}

    handle = model.register_forward_pre_hook(route, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
