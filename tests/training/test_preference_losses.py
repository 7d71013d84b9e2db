"""Losses of preference pairs on numbers worked by hand, and sums of rows."""

import math
from typing import Any

import pytest
import torch

from tree_rl.training.loss.preference_loss import preference_losses, sums_of_rows

# log pi - log ref of the chosen and the rejected row of two pairs: margins 3 and -1.
CHOSEN, REJECTED = torch.tensor([1.0, -2.0]), torch.tensor([-2.0, -1.0])


def worked(margin: float) -> float:
    """log(1 + e^-margin), which is -log sigmoid(margin)."""
    return math.log(1 + math.exp(-margin))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"beta": 0.5}, [worked(1.5), worked(-0.5)]),
        # Smoothed labels mix both orders.
        ({"beta": 0.5, "label_smoothing": 0.25}, [0.75 * worked(x) + 0.25 * worked(-x) for x in (1.5, -0.5)]),
        # IPO pulls the margin to half of one over beta.
        ({"beta": 0.25, "loss_type": "ipo"}, [(3 - 2) ** 2, (-1 - 2) ** 2]),
    ],
    ids=("sigmoid", "smoothed", "ipo"),
)
def test_losses_are_those_worked_by_hand(options: dict[str, Any], expected: list[float]) -> None:
    assert preference_losses(CHOSEN, REJECTED, **options).tolist() == pytest.approx(expected)


def test_rows_of_unequal_length_are_summed() -> None:
    log_probs = torch.tensor([-1.0, -2.0, -3.0, 0.0, -4.0, 0.0], requires_grad=True)
    found = sums_of_rows(log_probs, torch.tensor([0, 4, 6]))
    assert found.tolist() == [-6.0, -4.0]
    (found * torch.tensor([2.0, 3.0])).sum().backward()
    assert log_probs.grad.tolist() == [2, 2, 2, 2, 3, 3]
