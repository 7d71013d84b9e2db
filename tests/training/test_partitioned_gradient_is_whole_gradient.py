"""A forest in partitions of any size has the gradient of the rows alone, float64 to 1e-10, each token run once."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
from equal_gradients import assert_equal_gradients, gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from partitioned_steps import partitioned_gradients
from plain_decoder import PlainDecoder

from tree_rl.training.rows_alone import branch_log_probs
from tree_rl.tree.forest import Forest

VOCAB = 5
ROWS = st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12), min_size=1, max_size=7)


def check(rows: list[list[int]], capacity: int, loss: Callable[[torch.Tensor], torch.Tensor], **options: bool) -> None:
    """`options` as in `partitioned_gradients`."""
    model = PlainDecoder(VOCAB)
    got = partitioned_gradients(model, Forest.from_rows(rows), capacity, loss, **options)
    assert_equal_gradients(got, gradients(model, loss(branch_log_probs(model, rows))), 1e-10)


@settings(max_examples=40, deadline=None)
@given(rows=ROWS, capacity=st.integers(1, 40), seed=st.integers(0, 2**16))
def test_any_rows_any_budget_any_token_separable_loss(rows: list[list[int]], capacity: int, seed: int) -> None:
    weight_F = torch.from_numpy(np.random.default_rng(seed).normal(size=sum(map(len, rows))))

    def loss(log_probs_F: torch.Tensor) -> torch.Tensor:
        return (weight_F * log_probs_F.exp() + log_probs_F.square()).sum()

    check(rows, capacity, loss, relays_on_host=seed % 2 == 0)


@settings(max_examples=20, deadline=None)
@given(rows=ROWS, capacity=st.integers(1, 40))
def test_sequence_coupled_losses_take_one_preview_pass(rows: list[list[int]], capacity: int) -> None:
    offsets = np.cumsum([0, *map(len, rows)])

    def loss(log_probs_F: torch.Tensor) -> torch.Tensor:
        sums = [log_probs_F[a:b].mean().exp() for a, b in pairwise(offsets)]
        return torch.stack(sums).prod() + torch.stack(sums).square().sum()

    check(rows, capacity, loss, preview=True)
