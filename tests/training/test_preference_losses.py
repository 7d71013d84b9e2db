"""Losses of preference pairs on numbers worked by hand, and sums of rows."""

import math

import pytest
import torch

from tree_rl.training.loss.preference_loss import preference_losses, sums_of_rows

# log pi - log ref of the chosen and the rejected row of two pairs: margins 3 and -1.
CHOSEN, REJECTED = torch.tensor([1.0, -2.0]), torch.tensor([-2.0, -1.0])


def worked(margin: float) -> float:
    """log(1 + e^-margin), which is -log sigmoid(margin)."""
    return math.log(1 + math.exp(-margin))


def test_sigmoid_is_the_loss_of_dpo() -> None:
    found = preference_losses(CHOSEN, REJECTED, beta=0.5)
    assert found.tolist() == pytest.approx([worked(1.5), worked(-0.5)])


def test_smoothed_labels_mix_both_orders() -> None:
    found = preference_losses(CHOSEN, REJECTED, beta=0.5, label_smoothing=0.25)
    mixed = [0.75 * worked(half) + 0.25 * worked(-half) for half in (1.5, -0.5)]
    assert found.tolist() == pytest.approx(mixed)


def test_ipo_pulls_the_margin_to_half_of_one_over_beta() -> None:
    found = preference_losses(CHOSEN, REJECTED, beta=0.25, loss_type="ipo")
    assert found.tolist() == pytest.approx([(3 - 2) ** 2, (-1 - 2) ** 2])


def test_rows_of_unequal_length_are_summed() -> None:
    log_probs = torch.tensor([-1.0, -2.0, -3.0, 0.0, -4.0, 0.0], requires_grad=True)
    found = sums_of_rows(log_probs, torch.tensor([0, 4, 6]))
    assert found.tolist() == [-6.0, -4.0]
    (found * torch.tensor([2.0, 3.0])).sum().backward()
    assert log_probs.grad.tolist() == [2, 2, 2, 2, 3, 3]
