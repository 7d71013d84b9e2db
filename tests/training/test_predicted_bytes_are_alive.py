"""Bytes alive in a forward and backward are within 10 % of what the memory model predicts, on the device and the host,
also where ranks share a forest's tokens.

Gradients exist beforehand, as in any update but the first. Sizes are such that activations outweigh what is fixed.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from live_bytes import peak_bytes
from measured_models import build, measured_step
from rank_processes import run_ranks

from tree_rl.cost.memory.model import MemorySaving, Peak
from tree_rl.training import Rows, StepContext, TreeOptions, TreeStep
from tree_rl.training.memory.host_slab import host_slab
from tree_rl.training.memory.memory_of_module import read_memory_model
from tree_rl.training.micro_batch import MicroBatch, predicted_peak

CPU, F32, BF16 = torch.device("cpu"), torch.float32, torch.bfloat16
WIDE: dict[str, Any] = {"vocab_size": 500, "hidden_size": 128, "intermediate_size": 384, "head_dim": 32}
WIDE |= {"max_position_embeddings": 4096, "initializer_range": 0.02}
EXPERTS = {"num_experts": 8, "moe_intermediate_size": 96, "mlp_only_layers": []}
KEEP_ALL = MemorySaving()
SHARED: tuple[tuple[str, int | None], ...] = (("trunk", None), ("comb", 200))
"""Shape of the rows, and the budget of a partition."""


def rows_of(shape: str) -> list[np.ndarray]:
    """A long trunk with two branches, a comb with a tooth at every fifth of its spine, a bush of ten branches."""
    draw = np.random.default_rng(0)
    trunk_tokens, branches, tokens = {"trunk": (500, 2, 75), "comb": (500, 5, 60), "bush": (100, 8, 75)}[shape]
    trunk = draw.integers(1, 400, trunk_tokens)
    starts = [trunk_tokens * (i + 1) // branches if shape == "comb" else trunk_tokens for i in range(branches)]
    return [np.concatenate([trunk[:s], [400 + i], draw.integers(1, 400, tokens - 1)]) for i, s in enumerate(starts)]


def alive_and_predicted(step: TreeStep, model: Any, shape: str, *, ranks: int = 1) -> tuple[int, Peak]:
    """Of one update, gradients of an earlier one being there."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    rows = Rows.of(rows_of(shape))
    batches: list[MicroBatch] = []

    def update() -> None:
        result = step.run(rows, lambda outputs, members: (outputs["log_probs"].sum(), {}), is_separable=True)
        batches[:] = result.micro_batches

    alive = peak_bytes(update, host_slab(CPU))
    memory = read_memory_model(model, dtype=model.dtype, device=CPU)
    assert memory is not None
    return alive, predicted_peak(batches, replace(memory, sequence_ranks=ranks))


@pytest.mark.parametrize(
    ("kind", "checkpointing", "dtype", "shape", "max_tokens", "saving"),
    [
        ("dense", True, BF16, "bush", None, KEEP_ALL),
        ("dense", False, F32, "bush", None, KEEP_ALL),
        ("experts", False, BF16, "trunk", None, KEEP_ALL),
        ("dense", True, F32, "trunk", 100, KEEP_ALL),
        ("dense", True, F32, "bush", 200, KEEP_ALL),
        ("dense", False, F32, "comb", 200, KEEP_ALL),
        ("dense", True, F32, "trunk", None, MemorySaving(offloaded_layers=3)),
        ("dense", True, F32, "trunk", None, MemorySaving(tile_tokens=64)),
        ("dense", True, F32, "trunk", 200, MemorySaving(offloaded_layers=4, tile_tokens=64)),
    ],
)
def test_predicted_bytes_are_alive(
    kind: str, checkpointing: bool, dtype: torch.dtype, shape: str, max_tokens: int | None, saving: MemorySaving
) -> None:
    changes = WIDE | EXPERTS if kind == "experts" else WIDE
    model = build(kind, checkpointing=checkpointing, dtype=dtype, **changes)
    step = measured_step(model, TreeOptions(mode="tree", max_tokens=max_tokens), saving)
    alive, predicted = alive_and_predicted(step, model, shape)
    assert predicted.device == pytest.approx(alive, rel=0.1), predicted.device / alive
    host = host_slab(CPU).num_bytes if saving.offloaded_layers else 0
    assert predicted.host == pytest.approx(host, rel=0.1)


def rank_main(rank: int) -> list[float]:
    """Predicted over alive bytes of each case."""
    share = dist.new_group([0, 1])
    ratios = []
    for shape, max_tokens in SHARED:
        model: Any = build("dense", **WIDE)
        options = TreeOptions(mode="tree", max_tokens=max_tokens, self_check=False)
        step = TreeStep(model, options, context=StepContext.of(model, sequence_parallel=share))
        alive, predicted = alive_and_predicted(step, model, shape, ranks=2)
        ratios.append(predicted.device / alive)
    return ratios


def test_predicted_bytes_of_shared_tokens_are_alive() -> None:
    for ratios in run_ranks(rank_main, 2):
        assert ratios == [pytest.approx(1, rel=0.1)] * len(SHARED)
