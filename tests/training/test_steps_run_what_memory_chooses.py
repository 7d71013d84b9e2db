"""A real step runs what the memory model chooses, and its gradients are those of the rows.

On a CPU there is nothing to choose. Here the model is told that host memory is other memory, as on a GPU.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from equal_gradients import assert_equal_gradients
from failing_memory import fail_once
from measured_models import KINDS, build, hostile_rows, trained

from tree_rl.cost.memory import budget as budget_module
from tree_rl.cost.memory.model import MemoryModel
from tree_rl.training import TreeOptions, TreeStep
from tree_rl.training.context import StepContext
from tree_rl.training.memory.memory_of_module import read_memory_model

CPU = torch.device("cpu")
SHARES = (0.8, 0.6, 0.22)
"""Of the whole forest's predicted peak."""


def memory_of(model: Any) -> MemoryModel:
    memory = read_memory_model(model, dtype=torch.float32, device=CPU)
    assert memory is not None
    return replace(memory, offloads=True)


def step_of(model: Any, memory: MemoryModel | None, **options: Any) -> TreeStep:
    context = replace(StepContext.of(model), memory=memory)
    return TreeStep(model, TreeOptions(mode="tree", **options), context=context)


def tokens_for(memory: MemoryModel, share: float) -> int:
    """`max_tokens` that stands for a share of what all rows in one forest need."""
    whole = len({tuple(row[:end]) for row in hostile_rows() for end in range(1, len(row) + 1)})
    return memory.tokens_of(share * memory.bytes_of(whole))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_do_not_depend_on_the_choice(kind: str) -> None:
    model = build(kind)
    expected, _ = trained(step_of(model, None), model)
    memory = memory_of(model)
    chosen = set()
    told = ((True, 0.6), (False, 0.3)) if kind == "dense" else ()
    for offload, share in (*(("auto", share) for share in SHARES[::2]), *told):
        step = step_of(model, memory, max_tokens=tokens_for(memory, share), offload=offload)
        found, result = trained(step, model, infers=kind == "dense")
        assert_equal_gradients(found, expected)
        chosen |= {batch.choice.kind for batch in result.micro_batches if batch.choice is not None}
    cuts, offloads, _, on_host = (any(kind[place] for kind in chosen) for place in range(4))
    assert cuts and offloads and on_host, chosen


def test_out_of_memory_repeats_with_half_the_predicted_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget_module, "GRANULARITY", 1)
    model = build("dense")
    expected, whole = trained(step_of(model, None), model)
    memory = memory_of(model)
    step = step_of(model, memory)
    first = step.learner.budget.predicted(whole.micro_batches)
    assert first is not None
    fail_once(model, "backward", 0)
    found, result = trained(step, model)
    assert step.out_of_memory == 1
    assert_equal_gradients(found, expected)
    assert step.learner.budget.tokens is not None
    assert memory.bytes_of(step.learner.budget.tokens) <= first.device / 2
    smaller = step.learner.budget.predicted(result.micro_batches)
    assert smaller is not None and smaller.device < first.device
