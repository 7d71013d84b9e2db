"""Rows with weights of their own train as rows alone whose losses are multiplied, whole and in partitions."""

from typing import Any

import numpy as np
import pytest
import torch
from equal_gradients import assert_equal_gradients
from measured_models import build

from tree_rl.training import Rows, TreeOptions, TreeStep
from tree_rl.tree.forest import RowError

ROWS = [[5, 6, 7, 8, 9], [5, 6, 7, 10], [5, 6, 7, 8, 11, 12], [13, 14]]
TRAINED = [[0, 1, 0, 1, 1], [0, 1, 1, 1], [0, 0, 1, 1, 0, 1], [0, 1]]
WEIGHTS: list[Any] = [0.5, [9.0, 2.0, 0.0, 1.5], 0.0, 3.0]


def negative_log_likelihood(outputs: Any, members: Any) -> tuple[torch.Tensor, dict[str, float]]:
    return -outputs["log_probs"].sum(), {}


@pytest.mark.parametrize("max_tokens", (None, 4))
def test_a_number_per_row_or_per_token_multiplies_the_loss(max_tokens: int | None) -> None:
    alone, tree = build("dense"), build("dense")
    for row, mask, weight in zip(ROWS, TRAINED, WEIGHTS, strict=True):
        log_probs = alone(torch.tensor([row])).logits[0, :-1].log_softmax(-1).gather(1, torch.tensor(row[1:])[:, None])
        factor = torch.from_numpy(np.broadcast_to(weight, len(row))[1:] * mask[1:]).float()
        (-(log_probs[:, 0] * factor).sum()).backward()
    step = TreeStep(tree, TreeOptions(max_tokens=max_tokens, path_weighting="custom"))
    step.run(Rows.of(ROWS, trained=TRAINED, weights=WEIGHTS), negative_log_likelihood)
    found, wanted = ([parameter.grad for parameter in model.parameters()] for model in (tree, alone))
    assert_equal_gradients(found, wanted, floor=0.0)


def test_rows_without_weights_are_refused() -> None:
    step = TreeStep(build("dense"), TreeOptions(path_weighting="custom"))
    with pytest.raises(RowError, match=r"path_weighting=custom: expected weights of the rows"):
        step.run(Rows.of(ROWS), negative_log_likelihood)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ([1.0, 2.0], r"row 1: has 4 tokens and weights of shape \(2,\)"),
        ([[1.0]] * 4, r"row 1: has 4 tokens and weights of shape \(4, 1\)"),
        (float("nan"), "row 1: has a weight that is not a finite number"),
        ([1.0, 1.0, -1.0, 1.0], "row 1: has a weight that is not a finite number of at least 0"),
    ],
)
def test_weights_that_do_not_fit_a_row_are_refused(wrong: Any, message: str) -> None:
    with pytest.raises(RowError, match=message):
        Rows.of(ROWS, trained=TRAINED, weights=[1.0, wrong, 1.0, 1.0])
