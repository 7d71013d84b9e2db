"""A forest in partitions of any size has the gradient of the rows alone, float64 to 1e-10, each token run once."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_decoder import PlainDecoder

from tree_rl.training.loss.edges import plan_edges, wanted_everywhere
from tree_rl.training.loss.readout import EdgeReadout
from tree_rl.training.partitioned import PartitionedRun, inference_ops, training_ops
from tree_rl.training.rows_alone import branch_log_probs
from tree_rl.tree.forest import Forest
from tree_rl.tree.partition import plan_partitions

VOCAB = 5
CPU = torch.device("cpu")
ROWS = st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12), min_size=1, max_size=7)

RowLoss = Callable[[torch.Tensor], torch.Tensor]


def partitioned(
    model: PlainDecoder,
    rows: list[list[int]],
    capacity: int,
    loss: RowLoss,
    *,
    coupled: bool = False,
    offload: bool = False,
) -> list[torch.Tensor]:
    """Gradients of one partitioned step."""
    forest = Forest.from_rows(rows)
    plan = plan_partitions(forest, capacity, solver="heuristic")
    edges = plan_edges(forest, wanted_everywhere(forest), np.ones(len(rows), dtype=np.float32))
    readout = EdgeReadout(plan, edges, device=CPU)
    tokens_that_ran = 0

    def counted(**model_kwargs: Any) -> Any:
        nonlocal tokens_that_ran
        tokens_that_ran += model_kwargs["input_ids"].numel()
        return model(**model_kwargs)

    run = PartitionedRun(counted, forest, plan, readout, relays_on_host=offload)
    model.zero_grad()
    if coupled:
        assert "".join(run.infer()) == inference_ops(run.plan)
    slot_gradients = partial(readout.gradients, lambda outputs, _: (loss(outputs["log_probs"]), []), [])
    assert "".join(run.train(slot_gradients)) == training_ops(run.plan)
    # Every token once, and in the preview of coupled losses once more.
    assert tokens_that_ran == (1 + coupled) * forest.num_unique
    return [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]


def assert_exact(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    scale = max(float(g.norm()) for g in expected) or 1.0
    for one, reference in zip(got, expected, strict=True):
        assert float((one - reference).norm()) <= 1e-10 * max(float(reference.norm()), 1e-2 * scale)


def row_gradients(model: PlainDecoder, rows: list[list[int]], loss: RowLoss) -> list[torch.Tensor]:
    total = loss(branch_log_probs(model, rows))
    return list(torch.autograd.grad(total, list(model.parameters()), allow_unused=True, materialize_grads=True))


@settings(max_examples=40, deadline=None)
@given(rows=ROWS, capacity=st.integers(1, 40), seed=st.integers(0, 2**16))
def test_any_rows_any_budget_any_token_separable_loss(rows: list[list[int]], capacity: int, seed: int) -> None:
    model = PlainDecoder(VOCAB)
    weight_F = torch.from_numpy(np.random.default_rng(seed).normal(size=sum(map(len, rows))))

    def loss(log_probs_F: torch.Tensor) -> torch.Tensor:
        return (weight_F * log_probs_F.exp() + log_probs_F.square()).sum()

    got = partitioned(model, rows, capacity, loss, offload=seed % 2 == 0)
    assert_exact(got, row_gradients(model, rows, loss))


@settings(max_examples=20, deadline=None)
@given(rows=ROWS, capacity=st.integers(1, 40))
def test_sequence_coupled_losses_take_one_preview_pass(rows: list[list[int]], capacity: int) -> None:
    model = PlainDecoder(VOCAB)
    offsets = np.cumsum([0, *map(len, rows)])

    def loss(log_probs_F: torch.Tensor) -> torch.Tensor:
        sums = [log_probs_F[a:b].mean().exp() for a, b in pairwise(offsets)]
        return torch.stack(sums).prod() + torch.stack(sums).square().sum()

    got = partitioned(model, rows, capacity, loss, coupled=True)
    assert_exact(got, row_gradients(model, rows, loss))


def test_two_runs_of_one_plan_are_bitwise_equal() -> None:
    model = PlainDecoder(VOCAB)
    rows = [[1, 2, 3, 4], [1, 2, 3, 1, 2], [1, 2, 4], [2, 2]]
    first, second = (partitioned(model, rows, 3, lambda x: x.square().sum()) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
@settings(max_examples=3000, deadline=None)
@given(rows=ROWS, capacity=st.integers(1, 60), seed=st.integers(0, 2**16))
def test_thousands_of_random_forests(rows: list[list[int]], capacity: int, seed: int) -> None:
    model = PlainDecoder(VOCAB)
    weight_F = torch.from_numpy(np.random.default_rng(seed).normal(size=sum(map(len, rows))))
    got = partitioned(model, rows, capacity, lambda x: (weight_F * x.exp()).sum())
    assert_exact(got, row_gradients(model, rows, lambda x: (weight_F * x.exp()).sum()))
