"""One step of a forest in partitions, with nothing around it: what every parameter gets."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from tree_rl.cost.memory.model import MemorySaving
from tree_rl.training.context import StepContext
from tree_rl.training.loss.edges import plan_edges, wanted_everywhere
from tree_rl.training.loss.readout import EdgeReadout
from tree_rl.training.micro_batch import MicroBatch
from tree_rl.training.partitioned import PartitionedRun, training_ops
from tree_rl.training.rows import Rows
from tree_rl.tree.forest import Forest
from tree_rl.tree.partition import plan_partitions


def partitioned_gradients(
    model: Any,
    forest: Forest,
    capacity: int,
    loss: Callable[[torch.Tensor], torch.Tensor],
    *,
    preview: bool = False,
    after_preview: Callable[[], None] = lambda: None,
    relays_on_host: bool = False,
    device: torch.device | str = "cpu",
    **options: Any,
) -> dict[str, torch.Tensor]:
    """Gradients of a loss of all rows' log-probs, row after row, in partitions of at most `capacity` tokens.

    Every token runs once, and once more in a preview, which computes all log-probs before the first backward. With
    `relays_on_host` keys and values wait for children there. `options` are those of `PartitionedRun`.
    """
    device = torch.device(device)
    rows = Rows.of([forest.row_tokens(row) for row in range(forest.num_rows)])
    plan = plan_partitions(forest, capacity, solver="heuristic")
    saving = MemorySaving(relays_on_host=relays_on_host)
    batch = replace(MicroBatch.of(rows, range(forest.num_rows), forest), plan=plan, saving=saving)
    edges = plan_edges(forest, wanted_everywhere(forest), np.ones(forest.num_rows, dtype=np.float32), device)
    readout = EdgeReadout(batch.plan, edges, device=device)
    tokens_that_ran = 0

    def counted(**model_kwargs: Any) -> Any:
        nonlocal tokens_that_ran
        tokens_that_ran += model_kwargs["input_ids"].numel()
        return model(**model_kwargs)

    context: Any = StepContext(module=counted, device=device)
    run = PartitionedRun(context=context, batch=batch, readout=readout, **options)
    model.zero_grad()
    if preview:
        assert "".join(run.infer()) == "F" * run.plan.num_partitions
        after_preview()
    slot_gradients = partial(readout.gradients, lambda outputs: (loss(outputs["log_probs"]), []))
    assert "".join(run.train(slot_gradients)) == training_ops(run.plan)
    assert tokens_that_ran == (1 + preview) * forest.num_unique
    named = model.named_parameters()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in named}
