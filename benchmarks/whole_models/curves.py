"""Losses of many steps of SFT on the same batches: trees, rows, and rows in another order as the control."""

import gc
from collections.abc import Callable, Sequence

import torch
import torch.distributed
from many_gpus.ranks import DEVICE

from tree_rl.benchmark.batch import Batch
from tree_rl.benchmark.results import Columns
from tree_rl.cost import ModelShape
from whole_models.arms import PACKED, SFT, TREE, Arm, apart, balanced, loss_of, rows_of
from whole_models.random_engine import RandomWeightsEngine, mode_of

REORDERED = "reordered"
"""Packed rows last first: how far the same kernels drift from themselves."""
PAIRS = ((TREE, PACKED), (REORDERED, PACKED))


def loss_curves(
    build: Callable[[], RandomWeightsEngine],
    batches: Sequence[Batch],
    shape: ModelShape,
    *,
    steps: int,
    max_tokens: int,
    rank: int,
    world: int,
) -> list[Columns]:
    """Losses and their relative differences, a row for each step.

    The three runs follow each other, each from the same weights: two engines of a whole model would not fit.
    """
    place = {"rank": rank, "world": world}
    losses: dict[str, list[float]] = {}
    for name in (TREE, PACKED, REORDERED):
        engine = build()
        losses[name] = []
        for step in range(steps):
            batch = batches[step % len(batches)]
            rows = batch if name == TREE else apart(batch if name == PACKED else batch.reversed())
            arm = Arm(name=name, share=balanced(rows, shape, **place), max_tokens=max_tokens)
            losses[name].append(_step(engine, arm, len(batch.rows)))
        del engine
        gc.collect()
    return [_columns(step, losses) for step in range(steps)]


def _step(engine: RandomWeightsEngine, arm: Arm, all_rows: int) -> float:
    """One optimizer step; its loss over the rows of all ranks."""
    data = rows_of(arm, SFT, all_rows=all_rows)
    with mode_of(engine, arm.mode), engine.train_mode(disable_auto_offload=True):
        output = engine.train_batch(data, loss_of(SFT))
    loss = torch.tensor([float(torch.tensor(output["loss"]).sum())], dtype=torch.float64, device=DEVICE)
    # verl scales each rank's part by the number of ranks.
    torch.distributed.all_reduce(loss)
    return float(loss) / torch.distributed.get_world_size()


def _columns(step: int, losses: dict[str, list[float]]) -> Columns:
    row: Columns = {"step": step} | {f"loss_{name}": values[step] for name, values in losses.items()}
    return row | {f"loss_{name}_to_{other}": abs(losses[name][step] / losses[other][step] - 1) for name, other in PAIRS}
