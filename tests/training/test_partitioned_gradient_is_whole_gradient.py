"""A forest in partitions of any size has the gradient of the rows alone, float64 to 1e-10, each token run once."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from equal_gradients import assert_equal_gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from partitioned_steps import partitioned_gradients
from plain_decoder import PlainDecoder

from tree_rl.training.rows_alone import branch_log_probs
from tree_rl.tree.forest import Forest

VOCAB = 5
ROWS = st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12), min_size=1, max_size=7)

RowLoss = Callable[[torch.Tensor], torch.Tensor]


def partitioned(model: PlainDecoder, rows: list[list[int]], *arguments: Any, **options: Any) -> list[torch.Tensor]:
    return list(partitioned_gradients(model, Forest.from_rows(rows), *arguments, **options).values())


assert_exact = partial(assert_equal_gradients, tolerance=1e-10)


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

    got = partitioned(model, rows, capacity, loss, relays_on_host=seed % 2 == 0)
    assert_exact(got, row_gradients(model, rows, loss))


@settings(max_examples=20, deadline=None)
@given(rows=ROWS, capacity=st.integers(1, 40))
def test_sequence_coupled_losses_take_one_preview_pass(rows: list[list[int]], capacity: int) -> None:
    model = PlainDecoder(VOCAB)
    offsets = np.cumsum([0, *map(len, rows)])

    def loss(log_probs_F: torch.Tensor) -> torch.Tensor:
        sums = [log_probs_F[a:b].mean().exp() for a, b in pairwise(offsets)]
        return torch.stack(sums).prod() + torch.stack(sums).square().sum()

    got = partitioned(model, rows, capacity, loss, preview=True)
    assert_exact(got, row_gradients(model, rows, loss))
