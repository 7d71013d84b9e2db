"""Means and deviations of groups: what estimators compare a value with.

Legend: X values, F tokens.
"""

import numpy as np


def normalise(
    values_X: np.ndarray,
    group_X: np.ndarray,
    *,
    share_X: np.ndarray | None = None,
    number_X: np.ndarray | None = None,
    by_std: bool = True,
    epsilon: float = 1e-6,
) -> np.ndarray:
    """(value - mean of its group) / (deviation of its group + epsilon), float64 [X]; 0 in a group of one.

    Where a group's values with a share agree, one without has 0: there is no deviation to measure it by.

    Args:
        group_X: int, numbered from 0.
        share_X: weight of each value in mean and deviation; None: 1 each.
        number_X: number of equal samples that a value stands for; None: 1 each. The deviation is that of a sample,
            over n - 1.
        by_std: False only subtracts the mean.
    """
    values_X = np.asarray(values_X, dtype=np.float64)
    share_X = np.ones(len(values_X)) if share_X is None else share_X
    number_X = np.ones(len(values_X)) if number_X is None else number_X
    number = np.bincount(group_X, number_X)
    # A group without any share has no mean, and all of its values become 0.
    total = np.maximum(np.bincount(group_X, share_X), np.finfo(float).tiny)
    centred_X = values_X - (np.bincount(group_X, share_X * values_X) / total)[group_X]
    if by_std:
        variance = np.bincount(group_X, share_X * centred_X**2) / total * number / np.maximum(number - 1, 1)
        measured_X = (share_X > 0) | (variance > epsilon**2)[group_X]
        centred_X = np.where(measured_X, centred_X / (np.sqrt(variance) + epsilon)[group_X], 0.0)
    return np.where(number[group_X] > 1, centred_X, 0.0)


def whiten(values_F: np.ndarray, share_F: np.ndarray, epsilon: float = 1e-8) -> np.ndarray:
    """(value - mean) / sqrt(variance + epsilon) over tokens weighted by `share_F`, as verl's `masked_whiten`: with n
    the sum of shares, the variance is over n - 1. 0 where there is at most one token."""
    total = share_F.sum()
    if total <= 1:
        return np.zeros_like(values_F)
    centred_F = values_F - (values_F * share_F).sum() / total
    variance = (centred_F**2 * share_F).sum() / (total - 1)
    return centred_F / np.sqrt(variance + epsilon)
